"""What one worker trains, as far as the memory and the messages of its step depend on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.schedules.addition_tree import most_subtrees
from shoal.schedules.buffer_layout import LARGE_BYTES, SHARED_BYTES
from shoal.schedules.steps.step import Sizes, What
from shoal.schedules.steps.tensor_layout import Buckets, Layout

_INDEX_BYTES = 8  # of a position in the buffer
_RESIDUAL_BYTES = 4  # at least


@dataclass(frozen=True)
class WorkerModel:
    """Nothing of it is allocated. Of a stage of a pipeline it has what that stage holds."""

    layout: Layout
    state: Sequence[float]  # bytes of optimizer state of each tensor
    first_state: Sequence[float] = ()  # before the first step: Adagrad has it from the start
    parameter_bytes: int = 4  # of an element; those of a gradient are the layout's width
    names: Sequence[str] = ()  # of the tensors, where they are known
    untrained: float = 0.0  # bytes of buffers and frozen parameters
    statistics: Sequence[int] = ()  # bytes of each running statistic of BatchNorm
    microbatches: int = 1
    exact_microbatches: int | None = None  # the same bits at any number of replicas
    is_cast: bool = False  # forward runs under autocast
    accumulates: bool = False  # gradients of micro-batches are added up at the parameters
    is_stage: bool = False  # of a pipeline, where that is always so
    duplicates: frozenset[int] = frozenset()  # tensors whose values another stage decides
    takes_slices: bool = True  # the optimizer is one of torch that looks at each element alone
    on_one_host: bool = True
    on_cpu: bool | None = None  # processes of one host that compute on its cores; None: not known

    @property
    def width(self) -> float:
        """Bytes of a number of a gradient."""
        return float(self.layout.width)

    @property
    def residual_bytes(self) -> float:
        """A residual has at least 24 bits of precision, whatever the parameters have."""
        return max(float(_RESIDUAL_BYTES), self.width)

    @property
    def body(self) -> slice:
        """The buffer behind its header."""
        return slice(self.layout.offset, self.layout.size)

    @property
    def gradient_buffer(self) -> float:
        """Bytes of the buffer of gradients, with the loss and a flag for every tensor."""
        return self.layout.size * self.width

    @property
    def weights(self) -> float:
        """Bytes of the buffer of parameters."""
        return self.layout.size * self.parameter_bytes

    @property
    def whole_state(self) -> float:
        return sum(self.state)

    @property
    def rollback(self) -> float:
        """Bytes of weights and optimizer state that a worker of an elastic run returns to."""
        return self.weights + self.whole_state

    @property
    def gap_index(self) -> float:
        """Bytes of the positions in the buffer that belong to no parameter."""
        return _INDEX_BYTES * (self.layout.size - self.layout.offset - self.layout.trained)

    def unused_index(self, where: slice) -> float:
        """Bytes of the positions of a slice that need no residual."""
        overlaps = self.layout.overlaps(where)
        used = sum(one.elements for one in overlaps if one.tensor not in self.duplicates)
        return _INDEX_BYTES * float(max(0, where.stop - where.start) - used)

    def state_in(self, where: slice) -> float:
        """Bytes of the optimizer's state of a slice."""
        sizes = self.layout.sizes
        overlaps = self.layout.overlaps(where)
        return sum(self.state[one.tensor] * one.elements / sizes[one.tensor] for one in overlaps)

    def trained_in(self, where: slice) -> float:
        return sum(one.elements for one in self.layout.overlaps(where))

    def bucketed_gradients(
        self, buckets: Sequence[Buckets], in_place_bytes: float = math.inf
    ) -> float:
        """Bytes of a gradient buffer, and of what waits at parameters until a bucket is full."""
        adds_up = self.accumulates or self.is_stage
        return self.width * self.layout.gradients(buckets, in_place_bytes, adds_up)

    def plain(self) -> dict[What, float]:
        """The full model, its gradients where backward put them, and the optimizer's state."""
        return {
            What.PARAMETERS: self.weights + self.untrained,
            What.GRADIENTS: self.layout.trained * self.width,
            What.OPTIMIZER: self.whole_state,
        }

    def exact(self, rank: int, replicas: int, bucket_bytes: float) -> Sizes:
        """A gradient buffer, and the partial sums of exact=True: a buffer for each subtree."""
        assert self.exact_microbatches is not None
        sums = most_subtrees(self.exact_microbatches, rank, replicas)
        return {
            What.GRADIENTS: self.bucketed_gradients(self.layout.filled(bucket_bytes)),
            What.COPIES: sums * self.gradient_buffer,
        }

    def shares_host(self, wanted: bool | None) -> bool:
        """Whether workers see each other's memory, and use it; `wanted` is the strategy's word."""
        if wanted is None:
            return bool(self.on_cpu) and self.gradient_buffer >= SHARED_BYTES
        return wanted and self.on_cpu is not False

    def with_shared_weights(
        self, wanted: bool | None, rank: int, replicas: int, buckets: Sequence[Buckets]
    ) -> Sizes | None:
        """Of a worker that shares weights with its host: its slice of them counts; None: no."""
        layout = self.layout
        keeps_loss = layout.offset > 0 or not layout.header_size  # its dtype is precise enough
        is_plain = self.takes_slices and self.exact_microbatches is None and keeps_loss
        if replicas == 1 or not is_plain or not self.shares_host(wanted):
            return None
        own = layout.equal_slices(replicas)[rank]
        length = own.stop - own.start
        return {
            What.PARAMETERS: length * self.parameter_bytes + self.untrained,
            What.GRADIENTS: self.bucketed_gradients(buckets, LARGE_BYTES),
            What.OPTIMIZER: self.state_in(own),
            What.COPIES: layout.header_size * self.width,
            What.SHARED: length * self.width,
        }
