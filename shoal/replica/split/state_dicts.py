"""`state_dict()` of a model of which this worker has a part: the script would save that part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from shoal.errors import BadInput

if TYPE_CHECKING:
    from shoal.replica.fsdp.sharded_params import ShardedParams

PLAIN = (
    "job.save, called on all workers, saves the whole model; docs/training.md (Checkpoints) shows "
    "how to read it as a plain state_dict"
)
_ours = threading.local()


def state_of(model: nn.Module) -> dict[str, Any]:
    """The model's state_dict as it is here, for code that knows what is missing in it."""
    _ours.reads = True
    try:
        return model.state_dict()
    finally:
        _ours.reads = False


def refuse_released(model: nn.Module, flat: ShardedParams) -> None:
    """Have `state_dict()` raise while it would return a placeholder."""
    index_of = {id(p): i for i, (_, p) in enumerate(flat.named)}

    def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        for p in module._parameters.values():
            i = index_of.get(id(p))
            is_released = i is not None and not flat.is_full and not flat.is_resident(i)
            if i is not None and is_released and not _reads():
                raise BadInput(
                    f"state_dict() has no values of {flat.named[i][0]} here, since zero(3) keeps "
                    f"them on another worker: {PLAIN}; for a target network or averaged weights "
                    "take job.ema, or zero(2)"
                )

    for module in model.modules():
        object.__setattr__(module, "__deepcopy__", partial(_refuse_copy, type(module).__name__))
        if any(id(p) in index_of for p in module._parameters.values()):
            module.register_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]


def _refuse_copy(name: str, memo: Any) -> Any:
    """The hooks of a copy would compute with the parameters of the original."""
    raise BadInput(
        f"copy.deepcopy of {name}, as torch's AveragedModel does it, has no values under zero(3), "
        "which keeps them on all workers: copy it before job.setup or job.step, take job.ema for "
        "averaged weights, or take zero(2)"
    )


def tell_of_parts(model: nn.Module, strategy: str, say: Callable[[str], None]) -> None:
    """Have `state_dict()` say that it returns this worker's part."""

    def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not _reads():
            say(
                f"state_dict() of {type(module).__name__} has this worker's part of the weights "
                f"under {strategy}: {PLAIN}"
            )

    model.register_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]


def _reads() -> bool:
    return getattr(_ours, "reads", False)
