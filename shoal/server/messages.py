"""The metadata of each message, with the bounds that hold for every server."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shoal.server.consistency import Count, PushVerdict, Rule
from shoal.server.model.named_optimizer import NamedOptimizer, Option
from shoal.server.protocol import WireMessage as WireMessage

Name = Annotated[str, msgspec.Meta(max_length=4096)]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]
AnyDtype = Literal["float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool"]
Generations = Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 16)]
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=16)]


# ---------------------------------------------------------------------- the model


class ParameterSlice(WireMessage, frozen=True):
    """The rows of one parameter that one server holds."""

    parameter: Count
    start: Count  # in the flat buffer
    first_row: Count
    shape: Shape


class ReplicaSplit(WireMessage, frozen=True):
    """Which shard of a split replica a model is: its worker w has rank w * shards + shard."""

    shard: Count = 0
    shards: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    leader_model: Count | None = None  # the model of shard 0, whose leader decides for this one
    copies: Annotated[tuple[Count, ...], msgspec.Meta(max_length=1 << 20)] = ()
    """Parameters that another shard holds, too. They count for the norm there."""

    def rank(self, worker: int) -> int:
        return worker * self.shards + self.shard


UNSPLIT = ReplicaSplit()


class ModelSpec(WireMessage, frozen=True):
    """What one server holds of a model, and by which rule; the same from every worker.

    Where all shards of a replica have one leader, `index` and `servers` count the servers of
    all shards.
    """

    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    servers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    leader: Annotated[str, msgspec.Meta(max_length=512)]
    rule: Rule
    dtype: Dtype
    loss_flags_dtype: Dtype
    size: Count  # elements of a worker's flat buffer
    start: Count
    stop: Count
    parameters: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    slices: Annotated[tuple[ParameterSlice, ...], msgspec.Meta(max_length=1 << 20)]
    microbatches: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] | None = None  # exact: leaves
    optimizer: NamedOptimizer | None = None  # None: the workers update
    clip_norm: float | None = None
    compress: Annotated[str, msgspec.Meta(max_length=64)] | None = None  # how gradients travel
    norm_from_workers: bool = False  # a shard of a model: workers send the norm of all shards
    split: ReplicaSplit = UNSPLIT


# ---------------------------------------------------------------------- push and pull


class Commit(WireMessage, frozen=True):
    """A push is complete: the gradients of `step`, computed with the weights of `version`."""

    step: Count
    version: Count
    batch_fraction: float  # of the global batch
    lr: float | None = None
    save: Count | None = None  # servers save the step of this push under that number
    pushed_bytes: Count = 0  # of gradients and rows that were sent for it


class Ack(WireMessage, frozen=True):
    verdict: Literal["admitted", "folded", "dropped", "staged", "again"]
    position: Count
    save: Count | None = None  # the push has completed a step that the servers save


class Pull(WireMessage, frozen=True):
    """Weights for `step`, not older than `version`; `step=None` does not wait for a rule."""

    step: Count | None
    version: Count


class Pulled(WireMessage, frozen=True):
    """Clocks are those of live workers; None if the answer is not the leader's."""

    version: Count
    slowest: Count | None
    fastest: Count | None


class StateTensor(WireMessage, frozen=True):
    """A tensor of the payload: one value of the optimizer state of a parameter slice."""

    slice: Count  # its index among those of the server
    key: Annotated[str, msgspec.Meta(max_length=256)]
    dtype: AnyDtype
    shape: Shape


class ShardState(WireMessage, frozen=True):
    """Optimizer state: tensors in the payload, one after the other, and plain numbers here."""

    steps: Count
    tensors: Annotated[tuple[StateTensor, ...], msgspec.Meta(max_length=1 << 22)]
    numbers: tuple[tuple[Count, str, bool | int | float | None], ...] = ()
    weights: bool = True  # the payload begins with the weights of the server's slice
    options: tuple[Annotated[dict[str, Option], msgspec.Meta(max_length=64)], ...] = ()  # of groups


class RowBatch(WireMessage, frozen=True):
    """`count` ids in the payload, int64; with gradients behind them where rows are pushed.

    In a pull the first `copies` ids are of rows of other servers: copies of `version` or later.
    With `memory` the places of the rows are behind the ids, int64: they are below `places`, and the
    rows are written there, into that memory of the worker.
    """

    table: Name
    count: Count
    lr: float = 0.0
    copies: Count = 0
    version: Count = 0
    memory: Count | None = None
    places: Count = 0


class RowChunk(WireMessage, frozen=True):
    """Saved rows of a table: ids, then a tensor for each of `keys`. Without keys: clear it."""

    table: Name
    count: Count
    keys: Annotated[tuple[Name, ...], msgspec.Meta(max_length=16)]
    steps: Count


class SavedResidual(WireMessage, frozen=True):
    """Whether a worker has saved its residual here; the residual is the payload."""

    is_saved: bool


# ---------------------------------------------------------------------- control


class SetUp(WireMessage, frozen=True):
    """The answer to SETUP. One that comes back still has to enter; `is_over`: too late."""

    comes_back: bool = False
    is_over: bool = False


class Entered(WireMessage, frozen=True):
    """A worker that came back goes on with `step`; its earlier life had pushed up to `clock`."""

    step: Count
    clock: Count
    is_over: bool = False  # the others have finished
    gives_weights: bool = False  # the first ones: no worker is left that was there at the start


class BarrierRequest(WireMessage, frozen=True):
    number: Count
    generations: Generations | None = None  # of workers that take part, -1 for others; None: all


class LowestSurvivor(WireMessage, frozen=True):
    """The lowest surviving worker; the same for all workers that passed one barrier."""

    worker: Count


class Stats(WireMessage, frozen=True):
    """Ask for the counts; with `final`, after all workers have left."""

    final: bool = False


class Scalar(WireMessage, frozen=True):
    """The norm of all shards of a model; or the divisor of the gradients whose norms are asked."""

    value: float


class Norms(WireMessage, frozen=True):
    """The norms of the gradients that one server holds, or all servers, for clipping."""

    values: tuple[float, ...]


# ---------------------------------------------------------------------- replication


class PushDecided(WireMessage, frozen=True, tag="push"):
    """A push has got its verdict. The worker has staged what it brings on every server before."""

    worker: Count
    sequence: Count
    step: Count
    verdict: PushVerdict
    batch_fraction: float
    lr: float | None
    save: Count | None = None


class StepApplied(WireMessage, frozen=True, tag="step"):
    """The pushes counted since the last step make up `version`: update the weights."""

    version: Count
    lr: float | None
    divisor: float
    clip_factor: float | None
    save: Count | None = None  # the number of the checkpoint that follows it


class WorkerLeft(WireMessage, frozen=True, tag="left"):
    """A worker has left or was lost. The rule does not wait for it any longer."""

    worker: Count


class WorkerJoined(WireMessage, frozen=True, tag="joined"):
    """A worker that was lost, or late, goes on with `step`; its pushes count from 1 again."""

    worker: Count
    incarnation: Count
    step: Count


class PushesLost(WireMessage, frozen=True, tag="lost"):
    """Pushes of `worker` up to `sequence`, for `step`, were acknowledged by a lost server alone."""

    worker: Count
    sequence: Count
    step: Count


Decision = PushDecided | StepApplied | WorkerLeft | WorkerJoined | PushesLost


class LogEntry(WireMessage, frozen=True):
    """A decision of the leader. Every server applies the same entries in the same order."""

    position: Count  # from 1 on, without gaps
    decision: Decision


ShortText = Annotated[str, msgspec.Meta(max_length=128)]


class DeviceAsked(WireMessage, frozen=True):
    """A worker asks for memory on its GPU; `is_accepted`: it uses what it was offered."""

    device: ShortText = ""  # the UUID of the GPU
    process: ShortText = ""
    is_accepted: bool = False


class DeviceOffered(WireMessage, frozen=True):
    """The memory: a handle, or its number in the process of the server. Neither: there is none."""

    handle: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    number: Count = 0


MAX_HOT_ROWS = 1 << 16  # of one table
MAX_ROW_MEMORIES = 8  # of one worker
_Address = Annotated[str, msgspec.Meta(max_length=512)]


class ShareRows(WireMessage, frozen=True):
    """Memory of a worker for the rows that it pulls; it replaces what had this number."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=MAX_ROW_MEMORIES)]


class RowsPulled(WireMessage, frozen=True):
    """The answer to a pull; the rows are the payload."""

    hot: Count  # the number of the present set of hot rows
    refresh: bool = False  # the worker is asked to choose the next one
    missing: tuple[Count, ...] = ()  # rows at these positions have no copy that is new enough


class Heat(WireMessage, frozen=True):
    """`count` ids and their counts in the payload, int64; `total` pulls of rows in all."""

    count: Count
    total: Count
    hot: Count


class HotRows(WireMessage, frozen=True):
    """Set `number` of hot rows: `count` ids in the payload, in ascending order.

    First every server learns the set, then owners `publish` their rows. `addresses` has all
    servers as the receiver reaches them. In an answer: the present set.
    """

    table: Name
    number: Count
    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_HOT_ROWS)]
    publish: bool = False
    addresses: Annotated[tuple[_Address, ...], msgspec.Meta(max_length=1 << 16)] = ()


class CopiedRows(WireMessage, frozen=True):
    """Rows of set `number` that have changed; all hot rows of the sender are of `version`."""

    table: Name
    number: Count
    version: Count
    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_HOT_ROWS)]
