"""How much memory a sync takes that runs: a walk over it counts its tensors.

What a step is to hold is known before anything is allocated (`schedules/steps/`). Temporary tensors
of one operation are in neither.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor

# Objects of these modules are looked into. Groups, parameters and optimizers are not.
_OWN = "shoal_user_"  # of files of the user
_SYNC = (
    _OWN,
    "shoal.sync.",
    "shoal.comm.compress",
    "shoal.server.client.client",
    "shoal.server.model.",
    "shoal.replica.host_memory",
)
_SERVER = ("shoal.server.", "shoal.comm.compress", "shoal.server.embedding.")
_NOT_WALKED = ("shoal.sync.optimizer_step",)


class MemoryCounter:
    """Counts bytes of tensors, each byte once, whatever views there are."""

    def __init__(self) -> None:
        self._counted: list[tuple[int, int]] = []

    def add(self, tensors: Iterable[Tensor]) -> int:
        """The bytes of these tensors that were not counted before."""
        return sum(self._add(*extent) for extent in map(_extent, tensors) if extent is not None)

    def _add(self, start: int, stop: int) -> int:
        fresh = stop - start
        for begin, end in self._counted:
            fresh -= max(0, min(stop, end) - max(start, begin))
        overlapping = [(b, e) for b, e in self._counted if b <= stop and e >= start]
        apart = [(b, e) for b, e in self._counted if not (b <= stop and e >= start)]
        starts = [start, *(b for b, _ in overlapping)]
        stops = [stop, *(e for _, e in overlapping)]
        self._counted = [*apart, (min(starts), max(stops))]
        return fresh


def _extent(tensor: Tensor) -> tuple[int, int] | None:
    """From where to where its memory reaches: the whole storage, unless another process owns it."""
    if tensor.device.type == "meta" or not tensor.numel():
        return None
    if is_shared(tensor):
        start = tensor.data_ptr()
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return start, start + (last + 1) * tensor.element_size()
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def is_shared(tensor: Tensor) -> bool:
    """Whether torch did not allocate it: it looks at a mapped segment."""
    return not tensor.untyped_storage().resizable()


def tensors_held_by(sync: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a sync refers to, each with what it is (`What`)."""
    return _walk(sync, None, _SYNC, set())


def tensors_of_server(server: Any) -> list[Tensor]:
    """The tensors of a parameter server, without the memory that workers share with it."""
    return [t for column, t in _walk(server, None, _SERVER, set()) if column != "shared"]


def _walk(
    value: Any, column: str | None, modules: tuple[str, ...], seen: set[int]
) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield column or ("shared" if is_shared(value) else "copies"), value
        return
    if isinstance(value, str | bytes | int | float | slice | range) or id(value) in seen:
        return
    seen.add(id(value))
    column = getattr(type(value), "memory_column", column)
    for member in _members(value, modules):
        yield from _walk(member, column, modules, seen)
    if isinstance(value, GeneratorType):
        for member in inspect.getgeneratorlocals(value).values():
            if isinstance(member, Tensor):
                yield "in_flight", member


def _members(value: Any, modules: tuple[str, ...]) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, torch.optim.Optimizer):
        return list(value.state.values())
    if isinstance(value, list | tuple | set | deque):
        return list(value)
    module = type(value).__module__
    is_walked = module.startswith(modules) and not module.startswith(_NOT_WALKED)
    return list(vars(value).values()) if is_walked and hasattr(value, "__dict__") else ()
