"""`torch.nn.utils.clip_grad_norm_` on parameters of a loop of the user's own.

torch takes the norm of the gradients that a worker has: under zero and tp that is a part of them,
and after `job.no_sync` they are not reduced yet. So its last step, which gets all parameters,
is replaced by one that asks the loop to clip; it changes nothing for other parameters.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.utils import clip_grad

from shoal.errors import BadInput


class ClippingLoop(Protocol):
    def clips(self, params: Sequence[Tensor]) -> bool:
        """Whether these are its parameters, and their gradients are those of all workers."""
        ...

    def reduce_gradients(self, params: Sequence[Tensor]) -> bool:
        """Reduce what is not yet; whether this worker has all of them."""
        ...

    def clip_grad_norm_(self, params: Any, max_norm: float) -> Tensor: ...


_loops: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()
_called = threading.local()
_norm_of: Callable[..., Tensor] = nn.utils.get_total_norm
_clip_by: Callable[..., None] = nn.utils.clip_grads_with_norm_


def clip_for(loop: ClippingLoop) -> None:
    """From now on torch's function asks `loop` about its parameters."""
    with _lock:
        _loops.add(loop)
        vars(clip_grad)["_get_total_norm"] = _total_norm
        vars(clip_grad)["_clip_grads_with_norm_"] = _clip


def _total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
    _called.norm_type = float(norm_type)
    return _norm_of(tensors, norm_type, *args, **kwargs)


def _clip(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> None:
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    with _lock:
        loops = [loop for loop in _loops if loop.clips(params)]
    if not loops:
        _clip_by(params, max_norm, total_norm, *args, **kwargs)
        return
    if loops[0].reduce_gradients(params):
        grads = [p.grad for p in params if p.grad is not None]
        total_norm.copy_(_norm_of(grads, _called.norm_type))
        _clip_by(params, max_norm, total_norm, *args, **kwargs)
        return
    if _called.norm_type != 2.0:
        raise BadInput(
            f"torch's clip_grad_norm_ with norm_type={_called.norm_type:g} sees the part of the "
            "gradients that a worker has: clip by the 2-norm, which is taken over all workers"
        )
    total_norm.copy_(loops[0].clip_grad_norm_(params, max_norm))  # torch's function returns it
