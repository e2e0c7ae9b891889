"""What a loop of the user's own changes inside of torch, for its own parameters and optimizers.

clip_grad_norm_    takes the norm of the gradients that a worker has: a part of them under zero and
                   tp, and not reduced yet after `job.no_sync`. Its last step asks the loop to clip
GradScaler         an overflow that one worker finds skips the step on all of them, and all of them
                   lower the scale
optimizer.step     of an optimizer that the job does not know is refused where it would train one
                   worker's weights alone
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal.errors import BadInput
from shoal.sync.optimizer_step import overflow_of
from shoal.train.step.step import Step

Agree = Callable[[Tensor], None]  # in place
_AGREE = "_shoal_agrees_on_overflow"
_lock = threading.Lock()
_here = threading.local()  # ranks may be threads
_loops: weakref.WeakSet[Any] = weakref.WeakSet()
_norm_of: Callable[..., Tensor] = nn.utils.get_total_norm
_clip_by: Callable[..., None] = nn.utils.clip_grads_with_norm_


def clip_for(loop: Any) -> None:
    """From now on torch's `clip_grad_norm_` asks `loop` (an `OwnLoop`) about its parameters."""
    with _lock:
        _loops.add(loop)
        vars(clip_grad)["_get_total_norm"] = _total_norm
        vars(clip_grad)["_clip_grads_with_norm_"] = _clip


def _total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
    _here.norm_type = float(norm_type)
    return _norm_of(tensors, norm_type, *args, **kwargs)


def _clip(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> None:
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    with _lock:
        loops = [loop for loop in _loops if loop.clips(params)]
    if loops and not loops[0].reduce_gradients(params):
        if _here.norm_type != 2.0:
            raise BadInput(
                f"torch's clip_grad_norm_ with norm_type={_here.norm_type:g} sees the part of the "
                "gradients that a worker has: clip by the 2-norm, which is taken over all workers"
            )
        total_norm.copy_(loops[0].clip_grad_norm_(params, max_norm))  # torch's function returns it
        return
    if loops:
        grads = [p.grad for p in params if p.grad is not None]
        total_norm.copy_(_norm_of(grads, _here.norm_type))
    _clip_by(params, max_norm, total_norm, *args, **kwargs)


def agree_on_overflow(optimizer: torch.optim.Optimizer, device: torch.device, agree: Agree) -> None:
    """From now on a GradScaler passes what it finds for `optimizer` through `agree`."""
    vars(optimizer)[_AGREE] = (device, agree)
    vars(optimizer)["_step_supports_amp_scaling"] = False  # parts have optimizers of their own
    with _lock:
        if not hasattr(GradScaler.unscale_, "_shoal"):
            GradScaler.unscale_ = _agreeing(GradScaler.unscale_)  # type: ignore[method-assign]


def _agreeing(unscale: Callable[[Any, torch.optim.Optimizer], None]) -> Any:
    @functools.wraps(unscale)
    def unscale_(self: Any, optimizer: torch.optim.Optimizer) -> None:
        unscale(self, optimizer)
        device, agree = vars(optimizer).get(_AGREE, (None, None))
        if agree is not None and self.is_enabled():
            agree(overflow_of(self, optimizer, device))

    vars(unscale_)["_shoal"] = True
    return unscale_


class OtherOptimizers:
    """Until `end`: refuses steps, in this thread, of optimizers that the job does not know.

    Of one that has parameters of `steps`; and, from the second batch on, of one in a script that
    has given the job no model and exchanges nothing. `own` are optimizers of the script that the
    job knows; those that one of them wraps, as its attributes, belong to it.
    """

    def __init__(
        self, steps: Sequence[Step], own: Callable[[], Iterable[torch.optim.Optimizer]]
    ) -> None:
        self._steps = steps
        self._own = own
        self.batches = 0  # of which this worker got its rows, and others got others
        self._stepped: dict[int, tuple[torch.optim.Optimizer, int]] = {}  # and in which batch
        self.communicates = False  # the script exchanges tensors itself
        with _lock:
            _watch_steps()
        _here.others = weakref.ref(self)

    def end(self) -> None:
        if getattr(_here, "others", lambda: None)() is self:  # or a later job has ended
            del _here.others

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `BadInput` if it updates what it must not."""
        known = [*self._own(), *(step.update.optimizer for step in self._steps)]
        if any(value is optimizer for o in known for value in (o, *vars(o).values())):
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for step in self._steps:
            for name, p in step.flat.named:
                if id(p) in held:
                    raise BadInput(
                        f"an optimizer ({type(optimizer).__name__}) that the job does not know "
                        f"updates {name}, which job.setup or job.step manages under {step.term}: "
                        "pass it to job.setup with the model, and call step() of what that returns"
                    )
        if self._steps or not self.batches or self.communicates:
            return
        # one that lives for a batch, such as that of an adversarial example, may step
        _, first = self._stepped.setdefault(id(optimizer), (optimizer, self.batches))
        is_model = any(
            isinstance(p, nn.Parameter) for g in optimizer.param_groups for p in g["params"]
        )
        if first == self.batches or not is_model:
            return
        self.communicates = _wraps_models()
        if not self.communicates:
            raise BadInput(
                f"{type(optimizer).__name__} trains parameters that neither job.setup nor job.step "
                "was given, on this worker's rows of job.batches, so every worker would train a "
                "model of its own: model, optimizer = job.setup(model, optimizer), and "
                "job.backward(loss) instead of loss.backward()"
            )


def _wraps_models() -> bool:
    """Whether the script has torch's DDP or FSDP reduce gradients.

    A list of all objects would have tuples in it that other threads are making, which breaks them.
    """
    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDP")
    todo: list[type] = [nn.Module]
    for kind in todo:
        todo += kind.__subclasses__()
        is_wrapper = kind.__name__.startswith(wrappers)
        if is_wrapper and any(type(found) is kind for found in gc.get_referrers(kind)):
            return True
    return False


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    others = getattr(_here, "others", lambda: None)()
    if others is not None:
        others.check(optimizer)


@functools.cache
def _watch_steps() -> None:
    """Once: torch iterates over its hooks while ranks that are threads train."""
    register_optimizer_step_pre_hook(_before_step)
