"""Says in which step a loss was first not a finite number."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_LOOK_EVERY = 100  # steps, on a device that computes while the script goes on


class LossWatch:
    """On a CPU a loss is looked at in its step, elsewhere now and then: it would wait for it."""

    def __init__(self, say: Callable[[str], None]):
        self.reported: int | None = None  # the step
        self._say = say
        self._first: Tensor | None = None  # the first step with such a loss, or 0
        self._noted = 0

    def note(self, step: int, loss: Tensor) -> None:
        """The loss of a step."""
        if self.reported is not None:
            return
        is_bad = ~torch.isfinite(loss.detach())
        before = torch.zeros_like(is_bad, dtype=torch.int64) if self._first is None else self._first
        self._first = torch.where(is_bad & (before == 0), step, before)
        self._noted += 1
        if loss.device.type == "cpu" or self._noted % _LOOK_EVERY == 0:
            self.look()

    def look(self) -> None:
        """Say what was noted."""
        if self.reported is None and self._first is not None and (step := int(self._first.max())):
            self.reported = step
            self._say(f"the loss of step {step} is not a finite number (nan or inf)")
