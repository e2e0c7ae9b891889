"""Optimizers by name: what a worker may ask a server to run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec
import torch
from torch import nn

from shoal.errors import BadInput

Option = bool | int | float | None | tuple[float, ...]
_NOT_HERE = ("Optimizer", "LBFGS", "SparseAdam")  # the last two need the loss, or sparse gradients
# what these do to one element depends on no other, so a server may hold some rows of a matrix
_ELEMENTWISE = (
    *("SGD", "ASGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax"),
    *("Adagrad", "Adadelta", "RMSprop", "Rprop"),
)


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A class of torch.optim and its options."""

    name: Annotated[str, msgspec.Meta(max_length=64)]
    options: Annotated[dict[str, Option], msgspec.Meta(max_length=64)]

    @property
    def is_elementwise(self) -> bool:
        return self.name in _ELEMENTWISE

    def make(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer; BadInput when there is none of that name or its options are wrong."""
        known = classes()
        if self.name not in known:
            raise BadInput(f"torch.optim has no optimizer {self.name!r} that a server can run")
        kind: Callable[..., torch.optim.Optimizer] = known[self.name]
        try:
            return kind(params, **self.options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadInput(f"torch.optim.{self.name} refuses its options: {error}") from error


@functools.cache
def classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Every optimizer of torch.optim that works on dense gradients in one pass."""
    return {
        name: kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind.__name__ == name
        and name not in _NOT_HERE
    }


def name_of(factory: Any) -> Named:
    """What to call this factory on the wire; BadInput for one that has no name there."""
    func, options = factory, {}
    if isinstance(factory, functools.partial) and not factory.args:
        func, options = factory.func, factory.keywords
    known = {kind: name for name, kind in classes().items()}
    if not inspect.isclass(func) or func not in known:
        raise BadInput(
            "the servers run the optimizer and have to know it by name: use functools.partial of "
            'a torch.optim optimizer, or ps(update="worker")'
        )
    for key, value in options.items():
        if not _is_plain(value):
            raise BadInput(
                f"{known[func]}({key}=…) is no plain number, and the servers run the optimizer: "
                'give it as a number, or use ps(update="worker")'
            )
    plain = {
        k: tuple(map(float, v)) if isinstance(v, (tuple, list)) else v for k, v in options.items()
    }
    return Named(known[func], plain)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(item, (int, float)) for item in value)
    return value is None or isinstance(value, (bool, int, float))
