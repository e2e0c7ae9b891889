"""`torch.amp.GradScaler` on an optimizer of a loop of the user's own.

An overflow that one worker finds in its gradients has to skip the step on all of them, and all of
them have to lower the scale. So `unscale_`, which looks for it, asks the loop's workers where the
optimizer belongs to a loop; it changes nothing for other optimizers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

Agree = Callable[[Tensor], Tensor]
_KEY = "_shoal_agrees_on_overflow"
_lock = threading.Lock()


def agree_on_overflow(optimizer: torch.optim.Optimizer, device: torch.device, agree: Agree) -> None:
    """From now on a GradScaler passes what it finds for `optimizer` through `agree`."""
    vars(optimizer)[_KEY] = (device, agree)
    vars(optimizer)["_step_supports_amp_scaling"] = False  # parts have optimizers of their own
    with _lock:
        if not hasattr(GradScaler.unscale_, "_shoal"):
            GradScaler.unscale_ = _agreeing(GradScaler.unscale_)  # type: ignore[method-assign]


def _agreeing(unscale: Callable[[Any, torch.optim.Optimizer], None]) -> Any:
    @functools.wraps(unscale)
    def unscale_(self: Any, optimizer: torch.optim.Optimizer) -> None:
        unscale(self, optimizer)
        device, agree = vars(optimizer).get(_KEY, (None, None))
        if agree is None or not self.is_enabled():
            return
        state = self._per_optimizer_states[id(optimizer)]
        found = torch.zeros((), device=device)
        for value in state["found_inf_per_device"].values():
            found = found + value.to(found.device).view(())
        state["found_inf_per_device"] = {found.device: agree(found)}

    vars(unscale_)["_shoal"] = True
    return unscale_
