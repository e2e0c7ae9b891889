"""Tensors that modules keep as attributes while they compute: `self.aux_loss = …`.

They do not travel between stages. What one stage has set stands on the others as a tensor that
refuses to be used, so that neither the loss nor the forward goes on with an older value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shoal.errors import BadInput

Slot = tuple[str, str]  # the name of a module, and an attribute


class OnAnotherStage(Tensor):
    """Stands for what another stage has set; any use raises `BadInput`."""

    slot: Slot
    stage: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        found = next(t for t in _tensors(given) if isinstance(t, OnAnotherStage))
        raise refusal(found.slot, found.stage)

    def __deepcopy__(self, memo: Any) -> OnAnotherStage:
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{'.'.join(self.slot)} of stage {self.stage}>"


def refusal(slot: Slot, stage: int) -> BadInput:
    module, attribute = slot
    return BadInput(
        f"{module}.{attribute} is set by stage {stage} of the pipeline while it computes and used "
        f"on another stage, where it is not known: let the forward of {module} return it, and the "
        "model with its outputs"
    )


def kept_by(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The tensors that these modules keep, parameters and buffers aside."""
    values = [value for module in modules for value in vars(module).values()]
    return [tensor for value in values for tensor in _tensors(value)]


def kept_tensors(model: nn.Module) -> dict[Slot, Any]:
    """Attributes that hold tensors, themselves or in lists, and are no parameters or buffers."""
    return {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if not key.startswith("_") or isinstance(value, Tensor)
        if next(_tensors(value), None) is not None
    }


def snapshot(kept: Mapping[Slot, Any]) -> dict[Slot, list[Tensor]]:
    """The tensors as they are now: lists may grow."""
    return {slot: list(_tensors(value)) for slot, value in kept.items()}


def newly_kept(before: Mapping[Slot, list[Tensor]], after: Mapping[Slot, Any]) -> list[Slot]:
    """What was set in between; a list that has grown counts, too."""
    now = snapshot(after)
    return [s for s in now if [id(t) for t in now[s]] != [id(t) for t in before.get(s, [])]]


def hide(model: nn.Module, slots: Iterable[Slot], stage: int) -> None:
    """These are set by another stage."""
    for name, key in slots:
        placeholder = torch.empty(()).as_subclass(OnAnotherStage)
        placeholder.__dict__["slot"] = (name, key)
        placeholder.__dict__["stage"] = stage
        vars(model.get_submodule(name))[key] = placeholder


@contextmanager
def hidden(model: nn.Module, slots: Iterable[Slot], stage: int) -> Iterator[None]:
    """As `hide`, for a while."""
    slots = list(slots)
    before = {slot: vars(model.get_submodule(slot[0])).get(slot[1]) for slot in slots}
    hide(model, slots, stage)
    try:
        yield
    finally:
        for (name, key), value in before.items():
            vars(model.get_submodule(name))[key] = value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (list, tuple, dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
