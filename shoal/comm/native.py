"""How a call on tensors becomes numbers for the native collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.comm.work_queue import Lane, LaneWork
from shoal.errors import BadInput
from shoal.transport.shm.flight_recorder import DTYPES, KINDS, OPS
from shoal.transport.shm.segment import Segment, is_built

if is_built():
    from shoal.transport.shm import _shm

KIND = {name: number for number, name in enumerate(KINDS)}
UNEVEN = len(KINDS) - 1
_NUMBERS = {getattr(torch, name): code for code, name in enumerate(DTYPES) if code > 0}
_NUMBERS[torch.uint8] = 0
_OPS = {name: number for number, name in enumerate(OPS)}
_BOOL_OPS = {"sum": "or", "max": "or", "prod": "and", "min": "and"}
# types that are only moved travel as bytes or as the integers of their size
_SIZES = {1: 0, 2: 2, 4: 3, 8: 4, 16: 4}

PLAIN = {  # what needs no thought: a type of number and an operator, as codes
    (dtype, name): (code, number)
    for dtype, code in _NUMBERS.items()
    for name, number in _OPS.items()
    if number < _OPS["and"]
}


class Side:
    """A tensor's numbers in one piece in the host's memory; `store` brings back what changed."""

    __slots__ = ("_tensor", "host")

    def __init__(self, tensor: Tensor, copy: bool = False):
        self._tensor = tensor.detach()
        plain = self._tensor.device.type == "cpu" and self._tensor.is_contiguous()
        if copy:
            self.host = self._tensor.cpu().clone(memory_format=torch.contiguous_format)
        else:
            self.host = self._tensor if plain else self._tensor.cpu().contiguous()

    def store(self) -> None:
        if self.host is not self._tensor:
            self._tensor.copy_(self.host.view(self._tensor.shape))


class Pieces:
    """Tensors that are the pieces of one operand, wherever each of them lies."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.sides = [Side(tensor) for tensor in tensors]

    def addresses(self) -> list[int]:
        return [side.host.data_ptr() for side in self.sides]

    def store(self) -> None:
        for side in self.sides:
            side.store()


def moved_as(data: Tensor) -> tuple[int, int]:
    """(type code, how many of them one element is) for operations that only move."""
    code = _NUMBERS.get(data.dtype)
    if code is not None:
        return code, 1
    return _SIZES[data.element_size()], 2 if data.element_size() == 16 else 1


def reduced_as(data: Tensor, op: str) -> tuple[int, int, int]:
    """(type code, how many of them one element is, operator code)."""
    code = _NUMBERS.get(data.dtype)
    if code is not None and (op not in ("and", "or", "xor") or not data.dtype.is_floating_point):
        return code, 1, _OPS[op]
    if data.dtype == torch.bool and op != "mean":
        return 0, 1, _OPS[_BOOL_OPS.get(op, op)]
    if data.dtype.is_complex and op in ("sum", "mean"):
        part = torch.float32 if data.dtype == torch.complex64 else torch.float64
        if data.dtype != torch.complex32:
            return _NUMBERS[part], 2, _OPS[op]
    if data.dtype == torch.bool:
        raise BadInput("truth values have no mean: use max (any), min (all) or a number type")
    raise BadInput(f"shared memory has no {op} of {data.dtype}")


class NativeWork(LaneWork):
    """One call of a native collective: light ones are begun in the call (see `Lane`)."""

    __slots__ = ("_after", "_args", "_begun", "_keep", "_segment", "_table")

    def __init__(
        self,
        lane: Lane,
        segment: Segment,
        args: tuple[int, int, int, int, int, int, int],
        keep: object = None,
        after: Callable[[], None] | None = None,
        table: Tensor | None = None,
    ):
        """`args`: kind, address in, address out, count, type, operator, root.

        `keep` is what must stay in memory, `after` is done when the numbers have come.
        """
        self.lane = lane
        self.is_done = False
        self.error = None
        self._callbacks = None
        self._segment = segment
        self._args = args
        self._begun = False
        self._after = after
        self._keep = keep if table is None else (keep, table)
        self._table = 0 if table is None else table.data_ptr()

    def begin(self) -> bool:
        self._begun = begun = _shm.start(self._segment.handle, *self._args, self._table)
        return begun

    def run(self) -> None:
        segment = self._segment
        if self._begun:
            outcome = _shm.finish(segment.handle, segment.timeout_ns)
        else:
            outcome = _shm.collective(segment.handle, *self._args, self._table, segment.timeout_ns)
        if outcome:
            segment.check(outcome)
        if self._after is not None:
            self._after()
        self._keep = self._after = None


class TracedWork(NativeWork):
    """A call that leaves a span."""

    __slots__ = ("_start_ns", "detail")
    detail: str

    def begin(self) -> bool:
        self._start_ns = time.monotonic_ns()
        return super().begin()

    def run(self) -> None:
        start_ns = self._start_ns if self._begun else time.monotonic_ns()
        super().run()
        self.lane.tracer.add("reduce", start_ns, time.monotonic_ns(), "comm", self.detail)
