"""How much memory a sync takes: what a plan says of it, and what is counted in a running one.

A plan adds up bytes before anything is allocated (`SyncPlan.memory`). `held_by` walks over a sync
that runs and counts its tensors. Temporary tensors of one operation are in neither.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor

from shoal.replica.flat_params import FlatParams
from shoal.replica.ordered_sum import Node, add_leaf, runs_of

# Objects of these modules are looked into. Groups, parameters and optimizers are not.
_SYNC = ("shoal.sync.", "shoal.compress", "shoal.server.client.client", "shoal.server.model.")
_SERVER = ("shoal.server.", "shoal.compress", "shoal.embedding.")
_NOT_WALKED = ("shoal.sync.optimizer_step",)


@dataclass(frozen=True)
class ModelSizes:
    """A worker's model as the arithmetic of plans sees it; its tensors have no memory."""

    flat: FlatParams  # on the meta device
    untrained: int  # bytes of buffers and frozen parameters
    units: list[list[str]]  # parameters that zero(3) gathers together; the root unit first
    products: frozenset[str]  # those that it gathers in fewer bits under autocast
    state: dict[str, int]  # bytes of optimizer state of each parameter
    first_state: dict[str, int]  # the same before the first step: Adagrad has it from the start
    statistics: Sequence[int] = ()  # bytes of each running statistic of BatchNorm
    exact_microbatches: int | None = None
    is_cast: bool = False  # forward runs under autocast
    accumulates: bool = False  # gradients of micro-batches are added up at the parameters
    is_stage: bool = False  # of a pipeline, where that is always so
    duplicates: frozenset[str] = frozenset()  # parameters whose values another stage decides
    takes_slices: bool = False  # the optimizer is one of torch that looks at each element alone
    on_cpu: bool = False  # workers are known to be processes of a host that compute on its cores

    @property
    def width(self) -> int:
        return self.flat.dtype.itemsize

    @property
    def buffer(self) -> int:
        """Bytes of a buffer that is laid out as the parameters."""
        return self.flat.size * self.width

    @property
    def gap_index(self) -> int:
        """Bytes of the positions in the buffer that belong to no parameter (`gaps`)."""
        return 8 * (self.flat.size - self.flat.offset - sum(p.numel() for p in self.flat.params))

    def unused_in(self, where: slice) -> int:
        """Positions of a slice of the buffer that need no residual (`unused_positions`)."""
        used = 0
        for param in self.flat.ranges:
            if param.name not in self.duplicates:
                used += max(0, min(where.stop, param.stop) - max(where.start, param.start))
        return int(max(0, where.stop - where.start) - used)

    @property
    def separate_gradients(self) -> int:
        """Bytes of all gradients, each in a tensor of its own."""
        return sum(p.numel() for p in self.flat.params) * self.width

    def bucketed_gradients(self, buckets: Sequence[slice], in_place_bytes: float = math.inf) -> int:
        """Bytes of a gradient buffer, and of what waits at parameters until a bucket is full."""
        adds_up = self.accumulates or self.is_stage
        return self.flat.bucketed_gradients(buckets, in_place_bytes, adds_up) * self.width

    def exact_sums(self, rank: int, replicas: int) -> int:
        """Bytes of partial sums that exact=True keeps: most subtrees at a time, a buffer each."""
        assert self.exact_microbatches is not None
        root = (0, self.exact_microbatches)
        start, stop = runs_of(self.exact_microbatches, replicas)[rank]
        sums: dict[Node, Tensor] = {}
        most = 0
        for _ in range(start, stop):
            add_leaf(root, start, sums, torch.zeros(1))
            most = max(most, len(sums))
        return most * self.buffer


@dataclass(frozen=True)
class SyncMemory:
    """Bytes of one worker at its fullest, activations aside. Each byte is in one of them."""

    parameters: int  # with buffers and frozen ones; what is gathered for a moment is not in it
    gradients: int  # buffers, and gradients that wait at their parameters
    optimizer: int
    gathered: int = 0  # of other workers' parameters, at a time
    copies: int = 0  # further tensors of the strategy, such as anchors and mixing buffers
    residuals: int = 0  # what compression carries from step to step
    in_flight: int = 0  # messages on their way
    shared: int = 0  # segments that other processes see, where they hold nothing of the above
    server: int = 0  # parameter servers that live in this worker


# ------------------------------------------------------------------------------ counting


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
    """The tensors that a sync refers to, each with its column in `SyncMemory`."""
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
