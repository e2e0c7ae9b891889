"""A model's parameters and gradients as views of one buffer.

    data   [ p0 .. | p1 ...... | p2 . | p3 ........ ]
    grad   [ head | p0 .. | p1 ...... | p2 . | p3 ........ ]
              ^ loss, and a flag a parameter: did it get a gradient here?

Backward finishes the last parameters first, so buckets run from the end of the buffer to its
start, and the head travels with the bucket that goes out last. Everything that is exchanged
between workers is a slice of this buffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.errors import BadInput, ShoalError

ALIGN_BYTES = 64  # a parameter starts on a cache line, in every process alike
OnBucket = Callable[[slice], None]
Room = Callable[[slice], Tensor]


@dataclass(frozen=True)
class Piece:
    """Where one parameter lies in the buffer, in elements."""

    name: str
    start: int
    stop: int


class FlatParams:
    """The trainable parameters of a model, moved into one buffer in place.

    `data` holds the parameters from the moment of construction. `grad` exists once `watch` has
    been called: gradients are then copied into it, bucket by bucket, while backward still runs.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]):
        self.named = [(name, p) for name, p in named if p.requires_grad and p.numel()]
        if not self.named:
            raise BadInput("the model has no parameter that requires a gradient")
        self.params = [p for _, p in self.named]
        self.dtype, self.device = _common(self.named)
        self._align = max(1, ALIGN_BYTES // self.params[0].element_size())
        self.head_size = 1 + len(self.params)
        self.offset = self._round(self.head_size) if self._head_fits else 0
        self.pieces = self._lay_out()
        self.size = self._round(self.pieces[-1].stop)
        self.data = self._move()
        self.grad = torch.zeros(0, dtype=self.dtype, device=self.device)
        self.head = torch.zeros(self.head_size, dtype=self._head_dtype, device=self.device)
        self.notes_loss = False  # whether the engine leaves its loss in the head
        self.buckets_of_grad: list[slice] = []
        self.late: set[int] = set()  # parameters whose gradient is not final before `flush`
        self.in_halves = False  # whether hooks of gradients see nothing of a backward
        self._on_bucket: OnBucket | None = None
        self._room: Room | None = None

    @property
    def _head_fits(self) -> bool:
        """Whether the loss keeps its precision in the dtype of the gradients."""
        return self.dtype in (torch.float32, torch.float64)

    @property
    def _head_dtype(self) -> torch.dtype:
        return self.dtype if self._head_fits else torch.float32

    @property
    def head_travels_alone(self) -> bool:
        """True if the head is no part of `grad` and has to be exchanged by itself."""
        return not self._head_fits

    def buckets(
        self, num_bytes: int, first_bytes: int | None = None, within: slice | None = None
    ) -> list[slice]:
        """Cut `grad` into slices of about `num_bytes`, at parameter boundaries, last one first.

        The first bucket is smaller (`first_bytes`), so that communication starts early. `within`
        is a slice to cut instead of the whole, such as a shard.
        """
        width = self.data.element_size()
        wanted = max(1, (first_bytes or num_bytes) // width)
        begin, stop = (0, self.size) if within is None else (within.start, within.stop)
        cuts = []
        for piece in reversed(self.pieces[1:]):
            if begin < piece.start < stop and stop - piece.start >= wanted:
                cuts.append(slice(piece.start, stop))
                stop = piece.start
                wanted = max(1, num_bytes // width)
        return [*cuts, slice(begin, stop)] if begin < stop else cuts

    def move_to(self, data: Tensor, copy: bool = False) -> None:
        """Let the parameters be views of `data`, which has their values, or gets them (`copy`)."""
        for piece, p in zip(self.pieces, self.params, strict=True):
            view = data[piece.start : piece.stop].view(p.shape)
            if copy:
                view.copy_(p.data)
            p.data = view
        self.data = data

    def computing(self) -> AbstractContextManager[None]:
        """Around a forward: the parameters that it uses are here."""
        return nullcontext()

    def assembled(self, only: int | None = None) -> AbstractContextManager[None]:
        """While the block runs all parameters are here, on all ranks or on one; for reading."""
        return nullcontext()

    def rest(self) -> None:
        """Let go of parameters that are here only while they are used."""

    def gaps(self) -> Tensor:
        """The places between and behind parameters that belong to none of them."""
        is_gap = torch.ones(self.size, dtype=torch.bool)
        is_gap[: self.offset] = False
        for piece in self.pieces:
            is_gap[piece.start : piece.stop] = False
        return is_gap.nonzero().view(-1).to(self.device)

    def shards(self, n: int) -> list[slice]:
        """`n` consecutive slices, cut at parameter boundaries, as equal in size as those allow.

        A shard may be empty when there are fewer parameters than shards.
        """
        boundaries = [self.offset, *(piece.start for piece in self.pieces[1:]), self.size]
        span = self.size - self.offset
        cuts = [self.offset]
        for k in range(1, n):
            target = self.offset + span * k / n
            nearest = min(boundaries, key=lambda b: abs(b - target))
            cuts.append(max(nearest, cuts[-1]))
        cuts.append(self.size)
        return [slice(a, b) for a, b in itertools.pairwise(cuts)]

    def inside(self, where: slice) -> list[int]:
        """Which parameters lie in a slice that is cut at their boundaries."""
        return [i for i, p in enumerate(self.pieces) if where.start <= p.start < where.stop]

    def watch(
        self,
        buckets: Sequence[slice],
        leave_bytes: int | None = None,
        memory: Tensor | None = None,
        room: Room | None = None,
    ) -> None:
        """From now on gradients are collected in `grad`, and `arm` reports full buckets.

        A gradient of at least `leave_bytes` is left in the tensor where backward has put it, which
        saves a copy: `tensors_of_bucket` then gives that tensor instead of the slice of `grad`.
        `memory` of the same size, shared with somebody, may stand for memory of its own.
        With `room` there is no `grad`: it is asked for the memory of a bucket when that is full.
        """
        self._room = room
        if room is None:
            if memory is None:
                memory = torch.zeros(self.size, dtype=self.dtype, device=self.device)
            self.grad = memory
            if self._head_fits:
                self.head = self.grad[: self.head_size]
            self._views = [self.grad[p.start : p.stop] for p in self.pieces]
            for i in range(len(self.params)):
                self._home(i)
        self.notes_loss = True
        self.buckets_of_grad = list(buckets)
        self._members = [self.inside(bucket) for bucket in self.buckets_of_grad]
        self._bucket_of = {i: b for b, members in enumerate(self._members) for i in members}
        width = self.data.element_size()
        self._left = {
            i
            for i, p in enumerate(self.params)
            if leave_bytes is not None and p.numel() * width >= leave_bytes
        }
        self._runs = {
            b.start: list(self._cut_at(b, [i for i in members if i in self._left]))
            for b, members in zip(self.buckets_of_grad, self._members, strict=True)
        }
        for i, p in enumerate(self.params):
            p.register_post_accumulate_grad_hook(self._hook(i))  # type: ignore[no-untyped-call]

    def tensors_of_bucket(self, bucket: slice) -> list[Tensor]:
        """Where the gradients of a bucket are that was just reported; as many on every rank."""
        return [
            self.grad[run] if isinstance(run, slice) else self._views[run]
            for run in self._runs[bucket.start]
        ]

    def left_bytes(self) -> int:
        """Memory of gradients that were left where backward has put them."""
        grad = self.grad.untyped_storage().data_ptr()
        views = [self._views[i] for i in self._left]
        return sum(v.nbytes for v in views if v.untyped_storage().data_ptr() != grad)

    def arm(self, on_bucket: OnBucket) -> None:
        """The next backward is the last of this step: call `on_bucket(slice)` as buckets fill up.

        Buckets are reported in index order, the same on every rank, whatever order the
        gradients come in.
        """
        if not self.buckets_of_grad:
            return
        self._on_bucket = on_bucket
        self._missing = [len(members) for members in self._members]
        self._arrived = [False] * len(self.params)
        self._next = 0
        self.head[1:] = 1.0

    def flush(self) -> None:
        """Backward is over: report what is left. A parameter without a gradient counts as zero."""
        if self._on_bucket is None:
            return
        while self._next < len(self.buckets_of_grad):
            self._release(self._next)
        self._on_bucket = None

    def publish(self) -> None:
        """Hand the agreed gradients to the parameters, for the optimizer.

        A parameter that got no gradient on any rank keeps None, as on a single device: its
        momentum and weight decay stay untouched.
        """
        for p, view, arrived, i in zip(
            self.params, self._views, self._arrived, range(len(self.params)), strict=True
        ):
            p.grad = view if arrived or self.head[1 + i] > 0 else None

    def drop_gradients(self) -> None:
        """Forget `p.grad`, so that the next backward may put its own tensors there."""
        for p in self.params:
            p.grad = None

    def _hook(self, i: int) -> Callable[[Tensor], None]:
        def collect(p: Tensor) -> None:
            if self._on_bucket is None or i in self.late:
                return
            bucket = self._bucket_of[i]
            if bucket < self._next:
                raise ShoalError(
                    f"parameter {self.pieces[i].name} got a second gradient after it was sent; "
                    "use checkpoint(..., use_reentrant=False) in the model"
                )
            if not self._arrived[i]:
                self._arrived[i] = True
                self._missing[bucket] -= 1
            while self._next < len(self._missing) and self._missing[self._next] == 0:
                self._release(self._next)

        return collect

    def _release(self, bucket: int) -> None:
        """Copy the gradients of a bucket into `grad` and report it."""
        views = []
        grads = []
        where = self.buckets_of_grad[bucket]
        memory = None if self._room is None else self._room(where)
        for i in self._members[bucket]:
            grad = self.params[i].grad
            home = self._home(i) if memory is None else self.view(i, memory, where.start)
            if grad is None:
                home.zero_()
                self.head[1 + i] = 0.0
                self._arrived[i] = False
            else:
                self._arrived[i] = True
                if i in self._left and _is_plain(grad, self.params[i]):
                    self._views[i] = grad
                    continue
                views.append(home)
                grads.append(grad.to_dense() if grad.is_sparse else grad)
        if views:
            torch._foreach_copy_(views, grads)
        for i in self._members[bucket]:
            self.params[i].grad = None
        self._next = bucket + 1
        assert self._on_bucket is not None
        self._on_bucket(where)

    def view(self, i: int, memory: Tensor, start: int) -> Tensor:
        """Parameter `i` (or its gradient) in memory that stands for the buffer from `start` on."""
        piece = self.pieces[i]
        return memory[piece.start - start : piece.stop - start].view(self.params[i].shape)

    def _home(self, i: int) -> Tensor:
        """The place of a gradient in `grad`, which is from now on where it is."""
        self._views[i] = self.view(i, self.grad, 0)
        return self._views[i]

    def _cut_at(self, bucket: slice, left: list[int]) -> Iterator[slice | int]:
        """Slices of `grad` between the gradients that are left where they are, and these."""
        start = bucket.start
        for i in left:
            if self.pieces[i].start > start:
                yield slice(start, self.pieces[i].start)
            yield i
            start = self._round(self.pieces[i].stop)
        if start < bucket.stop:
            yield slice(start, bucket.stop)

    def _move(self) -> Tensor:
        """Take the parameters into one buffer; returns it."""
        data = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        self.move_to(data, copy=True)
        return data

    def _round(self, elements: int) -> int:
        return -(-elements // self._align) * self._align

    def _lay_out(self) -> list[Piece]:
        pieces = []
        start = self.offset
        for name, p in self.named:
            pieces.append(Piece(name, start, start + p.numel()))
            start = self._round(start + p.numel())
        return pieces


def _is_plain(grad: Tensor, parameter: nn.Parameter) -> bool:
    return (
        grad.layout == torch.strided
        and grad.is_contiguous()
        and grad.dtype == parameter.dtype
        and grad.shape == parameter.shape
    )


def _common(named: list[tuple[str, nn.Parameter]]) -> tuple[torch.dtype, torch.device]:
    first_name, first = named[0]
    for name, p in named:
        if p.dtype != first.dtype or p.device != first.device:
            raise BadInput(
                f"trainable parameters must share one dtype and device: {first_name} is "
                f"{first.dtype} on {first.device}, {name} is {p.dtype} on {p.device}; for mixed "
                'precision keep the model in float32 and pass precision="bf16" to job.step'
            )
    return first.dtype, first.device
