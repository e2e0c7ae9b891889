"""Arithmetic on one slice of a model: memory for pushes, weights, their sum, and the optimizer."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.replica.optimizers import ratios
from shoal.replica.ordered_sum import tree_sum
from shoal.schedules.addition_tree import Node, full_subtrees, runs_of
from shoal.server.messages import ModelSpec, ParameterSlice
from shoal.server.model.named_optimizer import step_without_hooks
from shoal.server.protocol import Refused

_MAX_SPARE = 2


class RowPush(NamedTuple):
    """Gradients of rows of one table, from one worker; possibly of no row."""

    table: str
    ids: Tensor
    grads: Tensor
    lr: float


class PushTensors(NamedTuple):
    """Memory for one push."""

    gradients: Tensor  # [partial sums, elements of the slice]
    loss_flags: Tensor  # [partial sums, 1 + parameters]


class PendingPush(NamedTuple):
    """A push that is complete, and not applied or dropped yet."""

    tensors: PushTensors
    rows: Sequence[RowPush]


class PushBuffer:
    """The push that a worker is sending, and the numbers that make every push count once.

    sequence   ... committed          complete; its memory may be overwritten once it is released.
                                      Until then no other is received, unless some were lost
               committed + 1          the push that may be received next

    On a replicated server the next push is received into memory of its own (`arriving`), which
    becomes the buffer when the push is committed in all copies (`install`).
    """

    def __init__(self, gradients: Tensor, loss_flags: Tensor, in_chain: bool = False):
        self.gradients = gradients  # [partial sums, elements of the slice]
        self.loss_flags = loss_flags  # [partial sums, 1 + parameters]
        self.in_chain = in_chain
        self._arriving: PushTensors | None = None
        self._spare: list[PushTensors] = []
        self.committed = 0
        # what has been received of the next push
        self.rows: list[RowPush] = []
        self.received: list[tuple[int, int]] = []  # ranges of bytes of `gradients`, in order
        self.received_bytes = 0  # of gradients and rows, as they were sent
        self.staged: dict[int, PendingPush] = {}  # by sequence, until it is applied or dropped

    @property
    def arriving(self) -> PushTensors:
        """Where the next push is received."""
        if not self.in_chain:
            return PushTensors(self.gradients, self.loss_flags)
        if self._arriving is None:
            self._arriving = self.new_tensors()
        return self._arriving

    def new_tensors(self) -> PushTensors:
        """Memory for a push that arrives, of the same form as the buffer."""
        if self._spare:
            return self._spare.pop()
        return PushTensors(torch.empty_like(self.gradients), torch.empty_like(self.loss_flags))

    def take_arrived(self) -> PushTensors | None:
        """The push that has been received; None if it is in the buffer already."""
        arrived = self._arriving
        self._arriving = None
        return arrived

    def install(self, tensors: PushTensors, recycles: bool) -> None:
        """Make this push the one in the buffer; the memory before it may be used again."""
        if recycles and len(self._spare) < _MAX_SPARE:
            self._spare.append(PushTensors(self.gradients, self.loss_flags))
        self.gradients, self.loss_flags = tensors

    @property
    def is_free(self) -> bool:
        """Whether the buffer may be overwritten."""
        return self.committed not in self.staged

    def is_repeated(self, sequence: int) -> bool:
        """Whether this push was committed before; a worker resends after a broken connection."""
        return sequence <= self.committed

    def expect(self, sequence: int) -> None:
        """Refuse a push that skips one, or that would overwrite one that is still needed."""
        if sequence != self.committed + 1:
            raise Refused(f"push {sequence} is out of order: expected {self.committed + 1}")
        if not self.is_free:
            raise Refused(f"push {sequence} arrives before push {self.committed} is applied")

    def commit(self, sequence: int, rows: Sequence[RowPush]) -> None:
        self.expect(sequence)
        self.committed = sequence
        self.staged[sequence] = PendingPush(PushTensors(self.gradients, self.loss_flags), rows)

    def skip_to(self, sequence: int) -> None:
        """Pushes up to this one are lost; the present one stays in its memory."""
        if not self.is_free:
            self.gradients, self.loss_flags = self.new_tensors()
        self.committed = sequence

    def begin(self) -> None:
        """Nothing of the next push has been received."""
        self.rows.clear()
        self.received.clear()
        self.received_bytes = 0

    def receive(self, start: int, stop: int, sent_bytes: int) -> None:
        """These bytes of the gradients arrive, as so many; refused if some of them came before."""
        at = bisect.bisect(self.received, (start, stop))
        before = self.received[at - 1][1] if at else 0
        after = self.received[at][0] if at < len(self.received) else self.gradients.nbytes
        if not before <= start < stop <= after:
            raise Refused(f"bytes {start}:{stop} of push {self.committed + 1} come twice")
        self.received.insert(at, (start, stop))
        self.received_bytes += sent_bytes

    def take_rows(self) -> tuple[RowPush, ...]:
        """The rows that have been received for the next push; then another one begins."""
        rows = tuple(self.rows)
        self.begin()
        return rows


DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ["float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool"]
}
NAMES: dict[torch.dtype, Any] = {dtype: name for name, dtype in DTYPES.items()}


class Shard:
    """One slice of the flat buffer, without connections or threads.

    `loss_flags` is the sum of what workers push beside gradients: the loss, then one flag per
    parameter that is positive if the parameter has a gradient.
    """

    def __init__(self, spec: ModelSpec, device: torch.device | None = None):
        """Weights, sums and optimizer state are on `device`; pushes and pulls may be elsewhere.

        Loss and flags stay on the host, where decisions are made.
        """
        self.spec = spec
        self.size = spec.stop - spec.start
        self.dtype = DTYPES[spec.dtype]
        self.device = device or torch.device("cpu")
        self.data = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        self.sum = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        self.loss_flags = torch.zeros(1 + spec.parameters, dtype=DTYPES[spec.loss_flags_dtype])
        self.params = [nn.Parameter(self._view(self.data, i)) for i in range(len(spec.slices))]
        self._grads = [self._view(self.sum, i) for i in range(len(spec.slices))]
        self._subtrees = subtrees_of(spec)
        self._copies = frozenset(spec.split.copies)
        self._gradients = sorted(gradient_ranges(spec))
        self._pushed: Tensor | None = None  # the only push of a step, which is not copied
        self.optimizer: torch.optim.Optimizer | None = None
        if spec.optimizer is not None and self.params:
            numbers = [held.parameter for held in spec.slices]
            self.optimizer = spec.optimizer.make(self.params, numbers)
            self._ratios = ratios(self.optimizer)
            self._step = step_without_hooks(self.optimizer)

    @property
    def pulled(self) -> Tensor:
        """What workers pull: weights, or the summed gradient if the workers update."""
        return self.data if self.spec.optimizer is not None else self.sum

    def new_pushes(self, in_chain: bool) -> PushBuffer:
        """Memory for the pushes of one worker, by partial sum."""
        sums = partial_sums(self.spec)
        gradients = torch.zeros(sums, self.size, dtype=self.dtype)
        loss_flags = self.loss_flags.new_zeros(sums, len(self.loss_flags))
        return PushBuffer(gradients, loss_flags, in_chain)

    def move_to(self, data: Tensor) -> None:
        """Keep the weights in this memory from now on; their values stay."""
        data.copy_(self.data)
        self.data = data
        for i, p in enumerate(self.params):
            p.data = self._view(data, i)

    def add(self, push: PushTensors | None, first: bool) -> None:
        """Add a push on arrival (None: it is lost); the `first` of a step starts the sum."""
        self._copy_pushed()
        if push is None:
            if first:
                self._clear_sum()
            return
        for total, pushed in ((self.sum, push.gradients[0]), (self.loss_flags, push.loss_flags[0])):
            if first:
                total.copy_(pushed)
            else:
                total.add_(pushed.to(total.device))

    def use(self, push: PushTensors) -> None:
        """The only push of a step, which is applied before this memory changes: not copied."""
        self._pushed = push.gradients[0]
        self.loss_flags.copy_(push.loss_flags[0])

    def _copy_pushed(self) -> None:
        if self._pushed is not None:
            self.sum.copy_(self._pushed)
            self._pushed = None

    def _clear_sum(self) -> None:
        self.sum.zero_()
        self.loss_flags.zero_()

    def add_all(self, pushes: Sequence[PushTensors]) -> None:
        """The sum of the pushes of all workers, in an order that is independent of arrival."""
        if not pushes:
            self._clear_sum()
            return
        self._sum_into(self.sum, [gradients for gradients, _ in pushes])
        self._sum_into(self.loss_flags, [loss_flags for _, loss_flags in pushes])

    def _sum_into(self, total: Tensor, pushes: Sequence[Tensor]) -> None:
        pushes = [pushed.to(total.device) for pushed in pushes]
        if self._subtrees is not None:
            assert self.spec.microbatches is not None
            workers = zip(pushes, self._subtrees, strict=True)
            known = {node: pushed[i] for pushed, nodes in workers for i, node in enumerate(nodes)}
            total.copy_(tree_sum((0, self.spec.microbatches), known))
        elif len(pushes) > 1:
            torch.add(pushes[0][0], pushes[1][0], out=total)
            for pushed in pushes[2:]:
                total.add_(pushed[0])
        else:
            total.copy_(pushes[0][0])

    def synchronize(self) -> None:
        """Return when the device has done all of this."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def check_received(self, pushes: PushBuffer) -> None:
        """Refuse a push without some gradient; what is between parameters need not arrive."""
        end = 0
        for start, stop in [*pushes.received, (pushes.gradients.nbytes, 0)]:
            at = bisect.bisect_left(self._gradients, (start, 0))
            if at and self._gradients[at - 1][1] > end:
                raise Refused(f"push {pushes.committed + 1} lacks gradients in bytes {end}:{start}")
            end = stop

    def divide(self, by: float) -> None:
        if by not in (0.0, 1.0):
            self._copy_pushed()
            self.sum.div_(by)

    def norms(self) -> list[float]:
        """The norms of the gradients, for clipping.

        Where workers compute the total norm, there is one for every slice of a parameter. It is
        0 if the parameter has no gradient.
        """
        self._copy_pushed()
        norm = torch.linalg.vector_norm
        grads = zip(self._grads, self.spec.slices, strict=True)
        if self.spec.norm_from_workers:
            return [float(norm(grad)) if self._has_grad(held) else 0.0 for grad, held in grads]
        # another shard of the model counts its copies
        counted = [g for g, h in grads if self._has_grad(h) and h.parameter not in self._copies]
        return [float(norm(grad)) for grad in counted]

    def update(self, lr: float | None, factor: float | None) -> None:
        """One step of the optimizer on the sum."""
        if self.optimizer is None:
            return
        if factor is not None:
            self._copy_pushed()
            self.sum.mul_(factor)
        if lr is not None:
            for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
                group["lr"] = lr * ratio
        grads = self._grads
        if self._pushed is not None:
            grads = [self._view(self._pushed, i) for i in range(len(self.params))]
        for p, grad, held in zip(self.params, grads, self.spec.slices, strict=True):
            p.grad = grad if self._has_grad(held) else None
        self._step()
        for p in self.params:
            p.grad = None
        self._pushed = None

    def _has_grad(self, held: ParameterSlice) -> bool:
        return bool(self.loss_flags[1 + held.parameter] > 0)

    def _view(self, buffer: Tensor, i: int) -> Tensor:
        held = self.spec.slices[i]
        start = held.start - self.spec.start
        return buffer[start : start + math.prod(held.shape)].view(held.shape)


def subtrees_of(spec: ModelSpec) -> list[list[Node]] | None:
    """The subtrees that each worker pushes, where additions have a fixed order."""
    if spec.microbatches is None:
        return None
    runs = runs_of(spec.microbatches, spec.rule.workers)
    return [full_subtrees((0, spec.microbatches), run) for run in runs]


def gradient_ranges(spec: ModelSpec) -> Iterator[tuple[int, int]]:
    """The bytes of each gradient among those of a push."""
    itemsize = DTYPES[spec.dtype].itemsize
    for row in range(partial_sums(spec)):
        for held in spec.slices:
            start = row * (spec.stop - spec.start) + held.start - spec.start
            yield start * itemsize, (start + math.prod(held.shape)) * itemsize


def partial_sums(spec: ModelSpec) -> int:
    """How many sums a worker pushes: one, or one per subtree where additions have a fixed order."""
    subtrees = subtrees_of(spec)
    return 1 if subtrees is None else max(map(len, subtrees))


def clip_factor(norms: Sequence[float], bound: float, dtype: torch.dtype) -> float:
    """The factor that clips gradients, as `torch.nn.utils.clip_grad_norm_` computes it."""
    if not norms:
        return 1.0
    total = torch.linalg.vector_norm(torch.tensor(norms, dtype=dtype))
    return float(torch.clamp(bound / (total + 1e-6), max=1.0))
