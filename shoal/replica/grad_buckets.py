"""Gradients in buckets of one flat buffer, reported while backward still runs.

    buffer   [ header | p0 .. | p1 ...... | p2 . | p3 ........ ]
               ^ the loss, and a flag per parameter: did it get a gradient on this rank?
             [     bucket 2   |   bucket 1       |   bucket 0   ]

Backward finishes the last parameters first, so buckets run from the end of the buffer to its
start. The header travels with the bucket that goes out last, so it costs no message of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.replica.flat_params import FlatLayout

OnBucket = Callable[[slice], None]
Allocate = Callable[[slice], Tensor]
SumGradients = Callable[[dict[nn.Parameter, Tensor], Tensor | None], None]
BeforeFlush = Callable[[Sequence[nn.Parameter], Tensor], None]


class GradBuckets:
    """Collects the gradients of flat parameters.

    It does nothing before `watch`. From then on gradients are copied into `buffer`, bucket by
    bucket, during the backward that follows `arm`.
    """

    def __init__(self, layout: FlatLayout):
        self.layout = layout
        self.buffer = torch.zeros(0, dtype=layout.dtype, device=layout.device)
        self.header = torch.zeros(
            layout.header_size,
            dtype=layout.dtype if layout.header_fits else torch.float32,
            device=layout.device,
        )
        self.records_loss = False  # whether the engine's loss is written to the header
        self.buckets: list[slice] = []
        # what to exchange for a bucket, by its start: as many tensors on every rank
        self.tensors: dict[int, list[Tensor]] = {}
        self._in_place: set[int] = set()
        self._places: dict[int, tuple[list[Tensor], int]] = {}  # of these, in `tensors`
        self.tied: set[int] = set()  # parameters whose gradient is not final before `flush`
        self.on_copy: Callable[[], None] | None = None  # called when gradients are there twice
        self.sum_gradients: SumGradients | None = None  # over workers of this replica
        self.before_flush: BeforeFlush | None = None  # then nothing is reported before `flush`
        self._on_bucket: OnBucket | None = None
        self._allocate: Allocate | None = None
        self._has_hooks = False

    # ------------------------------------------------------------------ setting up

    def watch(
        self,
        buckets: Sequence[slice],
        in_place_bytes: int | None = None,
        memory: Tensor | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        """From now on gradients are collected in `buffer`, and `arm` reports full buckets.

        A gradient of at least `in_place_bytes` is left in the tensor where backward has put it,
        which saves a copy: `tensors` then has that tensor instead of the slice of `buffer`.
        A header that does not fit into the buffer follows the bucket that goes out last.
        `memory` of the same size, shared with another process, replaces the buffer's own.
        With `allocate` there is no `buffer`: it is called for the memory of each full bucket.
        """
        layout = self.layout
        self._allocate = allocate
        if allocate is None:
            if memory is None:
                memory = torch.zeros(layout.size, dtype=layout.dtype, device=layout.device)
            self.buffer = memory
            if layout.header_fits:
                self.header = memory[: layout.header_size]
            self._views = {i: layout.view(i, memory, 0) for i in range(len(layout.params))}
        self.records_loss = True
        self.buckets = list(buckets)
        self._members = [layout.params_in(bucket) for bucket in self.buckets]
        self._bucket_of = {i: b for b, members in enumerate(self._members) for i in members}
        self._in_place = set()
        if in_place_bytes is not None:
            params = enumerate(layout.params)
            large = [i for i, p in params if p.nbytes >= in_place_bytes and not p.is_complex()]
            self._in_place.update(large)
        if allocate is None:
            self._list_tensors()
        if not self._has_hooks:  # it is called again when a group has changed
            self._has_hooks = True
            for i, p in enumerate(layout.params):
                p.register_post_accumulate_grad_hook(self._hook(i))  # type: ignore[no-untyped-call]

    def _list_tensors(self) -> None:
        self.tensors = {}
        self._places = {}
        for bucket, members in zip(self.buckets, self._members, strict=True):
            runs = list(self._runs_of(bucket, [i for i in members if i in self._in_place]))
            tensors = [
                self.buffer[run] if isinstance(run, slice) else self._views[run] for run in runs
            ]
            self.tensors[bucket.start] = tensors
            self._places |= {i: (tensors, at) for at, i in enumerate(runs) if isinstance(i, int)}
        if self.buckets and not self.layout.header_fits:
            self.tensors[self.buckets[-1].start].append(self.header)

    def _runs_of(self, bucket: slice, in_place: list[int]) -> Iterator[slice | int]:
        """Slices of `buffer` between the gradients that are left in place, and these."""
        start = bucket.start
        for i in in_place:
            param = self.layout.ranges[i]
            if param.start > start:
                yield slice(start, param.start)
            yield i
            start = self.layout.round_up(param.stop)
        if start < bucket.stop:
            yield slice(start, bucket.stop)

    # ------------------------------------------------------------------ what is exchanged

    def exchanged_bytes(self) -> int:
        """Bytes of gradients, flags and loss that a plain all-reduce sums in a step."""
        separate_header = 0 if self.layout.header_fits else self.header.nbytes
        return self.layout.size * self.layout.dtype.itemsize + separate_header

    def runs(self) -> list[slice]:
        """The ranges of the buffer that `tensors` stand for, bucket by bucket."""
        ranges = self.layout.ranges
        return [
            run if isinstance(run, slice) else slice(ranges[run].start, ranges[run].stop)
            for bucket, members in zip(self.buckets, self._members, strict=True)
            for run in self._runs_of(bucket, [i for i in members if i in self._in_place])
        ]

    def held(self) -> list[Tensor]:
        """The memory of gradients: the buffer, and those left where backward has put them."""
        return [self.buffer, *(self._views[i] for i in self._in_place)]

    def release(self) -> None:
        """Free the gradients that were left where backward has put them."""
        for i in self._in_place:
            self._reset_view(i)

    # ------------------------------------------------------------------ one step

    def record_loss(self, loss: Tensor) -> None:
        """The header leaves with the last bucket, so call this before the last backward."""
        if self.records_loss:
            self.header[0] = loss

    def arm(self, on_bucket: OnBucket) -> None:
        """Report full buckets of the next backward in index order, the same on every rank."""
        if not self.buckets:
            return
        self._on_bucket = on_bucket
        self._missing = [len(members) for members in self._members]
        self._arrived = [False] * len(self.layout.params)
        self._next = 0
        self.header[1:] = 1.0

    def flush(self) -> None:
        """Backward is over: report the rest. A parameter without a gradient counts as zero."""
        if self._on_bucket is None:
            return
        if self.before_flush is not None:
            self.before_flush(self.layout.params, self.header[:1])
        while self._next < len(self.buckets):
            self._report(self._next)
        self._on_bucket = None

    def abandon(self) -> None:
        """The step that is under way will be computed again from its start."""
        self._on_bucket = None
        for p in self.layout.params:
            p.grad = None

    def publish(self) -> None:
        """Hand reduced gradients to the parameters; one that has none on any rank keeps None."""
        params = self.layout.params
        arrived = self.arrived(range(len(params)), self.header)
        for i, p in enumerate(params):
            p.grad = self._views[i] if i in arrived else None

    def arrived(self, wanted: Sequence[int], header: Tensor) -> set[int]:
        """Of some parameters those that have a gradient on any rank, by the summed `header`.

        It is read, which waits for the device, only where this rank has no gradient of one.
        """
        found = {i for i in wanted if self._arrived[i]}
        if len(found) < len(wanted):
            flags = header.tolist()
            found.update(i for i in wanted if flags[1 + i] > 0)
        return found

    # ------------------------------------------------------------------ during backward

    def _hook(self, i: int) -> Callable[[Tensor], None]:
        """It does not keep the buckets alive: Python's collector does not see it in the tensor."""
        weak = weakref.ref(self)

        def collect(p: Tensor) -> None:
            grads = weak()
            if grads is None or grads._on_bucket is None:
                return
            if i in grads.tied or grads.before_flush is not None:
                return
            bucket = grads._bucket_of[i]
            if bucket < grads._next:
                raise ShoalError(
                    f"parameter {grads.layout.ranges[i].name} got a second gradient after it was "
                    "sent; use checkpoint(..., use_reentrant=False) in the model"
                )
            if not grads._arrived[i]:
                grads._arrived[i] = True
                grads._missing[bucket] -= 1
            while grads._next < len(grads._missing) and grads._missing[grads._next] == 0:
                grads._report(grads._next)

        return collect

    def _report(self, number: int) -> None:
        """Copy the gradients of a bucket into its memory and report it."""
        bucket = self.buckets[number]
        memory = None if self._allocate is None else self._allocate(bucket)
        layout = self.layout
        views = self._views if memory is None else {}
        targets = []
        grads = []
        for i in self._members[number]:
            if memory is None:
                target = self._reset_view(i)
            else:
                target = views[i] = layout.view(i, memory, bucket.start)
            grad = layout.params[i].grad
            self._arrived[i] = grad is not None
            if grad is None:
                target.zero_()
                self.header[1 + i] = 0.0
            elif i in self._in_place and _is_plain(grad, layout.params[i]):
                self._set_view(i, grad)  # it stays where backward has put it
            else:
                targets.append(target)
                grads.append(grad.to_dense() if grad.is_sparse else grad)
        if self.on_copy is not None:
            self.on_copy()
        if targets:
            torch._foreach_copy_(targets, grads)
        for i in self._members[number]:
            layout.params[i].grad = None
        if self.sum_gradients is not None:
            header = self.header if number == len(self.buckets) - 1 else None  # goes out with it
            self.sum_gradients({layout.params[i]: views[i] for i in self._members[number]}, header)
        self._next = number + 1
        assert self._on_bucket is not None
        self._on_bucket(bucket)

    def _reset_view(self, i: int) -> Tensor:
        """The range of a gradient in `buffer`, where it is from now on."""
        view = self.layout.view(i, self.buffer, 0)
        self._set_view(i, view)
        return view

    def _set_view(self, i: int, view: Tensor) -> None:
        self._views[i] = view
        if i in self._places:
            tensors, at = self._places[i]
            tensors[at] = view


def _is_plain(grad: Tensor, parameter: nn.Parameter) -> bool:
    return (
        grad.layout == torch.strided
        and grad.is_contiguous()
        and grad.dtype == parameter.dtype
        and grad.shape == parameter.shape
    )
