"""What a step computes: layers, from a transformer's sizes or from a module that was traced."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shoal.cluster.program import FUSED, ModelProgram

# none, selective, full, or operations of a block, such as "norm,activation"
Recompute = str
OPERATIONS = ("norm", "qkv", "attention", "up", "activation")


class Kernel(NamedTuple):
    """One operation on a device. A matrix product has `flops` above 0, others only move bytes."""

    name: str
    flops: float
    bytes: float  # read and written in device memory
    m: int = 0  # rows, columns and inner size of a matrix product, and how many of them
    n: int = 0
    k: int = 0
    batch: int = 1


class LayerMessage(NamedTuple):
    """A collective inside a replica, while a layer computes."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, ring_attention
    axis: str  # tp, ep or cp
    bytes: float  # V, as `collectives.cost.price` counts it
    beside: tuple[Kernel, ...] = ()  # rounds of a ring travel while these compute on its blocks


class Split(NamedTuple):
    """How a micro-batch and a layer are divided."""

    microbatch: int = 1  # samples
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    ep: int = 1
    recompute: Recompute = "none"
    flash_attention: bool = False
    hide: tuple[str, ...] = ()  # axes whose messages run beside computing
    fold_ep: bool = False  # ranks of tp hold whole experts, as those of ep do
    program: ModelProgram = FUSED


@dataclass(frozen=True)
class LayerCost:
    """One layer, one micro-batch, one device."""

    forward: tuple[Kernel, ...]
    backward_input: tuple[Kernel, ...]
    backward_weight: tuple[Kernel, ...]
    parameters: float  # numbers on one device
    activation_bytes: float  # kept between forward and backward
    output_bytes: float  # what the next layer gets: sent where a pipeline is cut behind it
    recompute: tuple[Kernel, ...] = ()  # of the forward, before backward
    forward_messages: tuple[LayerMessage, ...] = ()
    backward_messages: tuple[LayerMessage, ...] = ()
    shared_parameters: float = 0.0  # of an earlier layer: another stage needs a copy of them
    largest_tensor: float = 0.0  # numbers of its largest parameter; 0: not known
    expert_parameters: float = 0.0  # of those on the device, what ranks of ep do not have in common
    tensors: int = 0  # parameters that a program updates one by one
    passing_bytes: float = 0.0  # more than activations, while its backward runs


class HeldTensor(NamedTuple):
    """A parameter or a buffer of a known model, in the order in which the model names them."""

    name: str
    shape: tuple[int, ...]
    layer: int  # which of all layers, one after the other, has it
    unit: int = 0  # parameters that zero(3) gathers together; 0 is the root unit
    is_divided: bool = False  # by tp
    is_expert: bool = False  # divided by ep
    is_trained: bool = True
    is_cast: bool = False  # autocast takes it in 16 bits, and so zero(3) gathers it


class StageTensors(NamedTuple):
    """The tensors of one worker."""

    shapes: tuple[tuple[int, ...], ...]  # of trained ones
    # their places in `shapes`, by what zero(3) gathers; root first
    units: tuple[tuple[int, ...], ...]
    cast: frozenset[int]  # those that zero(3) gathers in 16 bits
    untrained: float  # numbers of others


class StoredRows(NamedTuple):
    """The rows of a `shoal.Embedding`, which live in a store and not in the model."""

    rows: float
    row_bytes: float
    state_bytes: float = 0.0  # of the optimizer, for a row
    ids: float = 0.0  # of a sample

    @property
    def bytes(self) -> float:
        """With all rows in use, and where each of them is."""
        return self.rows * (self.row_bytes + self.state_bytes + _INDEX_BYTES)

    def seen(self, samples: float) -> float:
        """Different rows that so many samples ask for, if all are asked for alike."""
        return -self.rows * math.expm1(-samples * self.ids / self.rows)


GROUPED = "experts "  # how the names of products begin that are one of a group
_INDEX_BYTES = 12  # of a row's id and its place


@dataclass(frozen=True)
class LayerRun:
    """Equal layers, one after the other."""

    name: str
    count: int


@dataclass(frozen=True)
class Precision:
    """Bytes of each number, as mixed-precision training has them (fp32 training: 4, 4, 0, 8)."""

    compute: str = "fp32"  # data type of matrix products
    parameter_bytes: int = 4
    gradient_bytes: int = 4
    master_bytes: int = 0  # a copy of the parameters in fp32
    state_bytes: int = 8  # of the optimizer: 8 for Adam, 4 for momentum, 0 for SGD

    @property
    def width(self) -> int:
        """Bytes of a number of a product."""
        return 2 if self.compute in ("fp16", "bf16", "fp8") else 4


@dataclass(frozen=True)
class SplitLimits:
    """How far a model can be split: a size of tp, cp or ep divides each of its numbers here."""

    tp: tuple[int, ...] = (1,)  # heads of queries, heads of keys
    tp_sizes: tuple[int, ...] | None = None  # where only these are known to work
    cp: int = 1  # positions of a sequence
    ep: int = 1  # experts
    stages: int | None = None  # the most of pp; None: as many as there are layers
    sequence_parallel: bool = False
    selective_recompute: bool = False  # whether it is known which operations are attention


UNSPLIT = SplitLimits()


class Workload(Protocol):
    """A model and one sample of its data."""

    @property
    def name(self) -> str: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def runs(self) -> tuple[LayerRun, ...]: ...
    @property
    def limits(self) -> SplitLimits: ...
    @property
    def row_tables(self) -> tuple[StoredRows, ...]: ...
    @property
    def accumulate(self) -> int: ...  # micro-batches of a batch that the script itself asks for
    def cost(self, run: int, split: Split) -> LayerCost:
        """The cost of one layer of the run of this index."""
        ...

    def model_flops(self, samples: int, flash_attention: bool = False) -> float:
        """Operations of forward and backward without recompute, for the MFU."""
        ...

    def tensors(self, layers: tuple[int, ...], split: Split) -> StageTensors | None:
        """What a worker with so many layers of each run holds; None: only how many numbers."""
        ...


def parameters_of(workload: Workload) -> float:
    """Numbers of the whole model."""
    runs = enumerate(workload.runs)
    return sum(run.count * workload.cost(index, Split()).parameters for index, run in runs)


def product(name: str, m: float, n: float, k: float, width: int, batch: float = 1) -> Kernel:
    """A matrix product [m, k] x [k, n], `batch` times."""
    rows, columns, inner, times = (max(1, round(size)) for size in (m, n, k, batch))
    flops = 2.0 * rows * columns * inner * times
    moved = float(width) * times * (rows * inner + inner * columns + rows * columns)
    return Kernel(name, flops, moved, rows, columns, inner, times)


def moving(name: str, num_bytes: float) -> Kernel:
    """An operation that is bound by memory: norms, dropout, activations, additions."""
    return Kernel(name, 0.0, num_bytes)


def gradients_of(kernel: Kernel, width: int) -> tuple[Kernel, Kernel]:
    """The products of backward: the gradient of the input and that of the weight."""
    _, _, _, m, n, k, batch = kernel
    to_input = product(f"{kernel.name} input gradient", m, k, n, width, batch)
    return to_input, product(f"{kernel.name} weight gradient", k, n, m, width, batch)
