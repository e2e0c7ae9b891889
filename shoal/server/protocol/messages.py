"""The metadata of each message, with the bounds that hold for every server."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shoal.server.consistency import Count, Rule
from shoal.server.model.named_optimizer import Named, Option

Name = Annotated[str, msgspec.Meta(max_length=4096)]
Lane = Literal["control", "push", "pull", "rows", "follow"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]
AnyDtype = Literal["float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool"]
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=16)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
MOST_HELLO_BYTES = 512


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of all metadata."""


class Challenge(Message, frozen=True):
    nonce: Nonce


class Hello(Message, frozen=True):
    nonce: Nonce
    lane: Lane
    proof: Nonce


class Welcome(Message, frozen=True):
    proof: Nonce


class Error(Message, frozen=True):
    """Why a request was refused. `lost` is the worker whose death is the cause."""

    sentence: Annotated[str, msgspec.Meta(max_length=4096)]
    lost: int | None = None


class Cut(Message, frozen=True):
    """Rows of one parameter."""

    parameter: Count
    start: Count
    first_row: Count
    shape: Shape


class PartOf(Message, frozen=True):
    """Where a model stands among the parts of replicas: its worker w is rank w * parts + part."""

    part: Count = 0
    parts: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    follows: Count | None = None  # the model of part 0, whose lead decides for this one, too
    copies: Annotated[tuple[Count, ...], msgspec.Meta(max_length=1 << 20)] = ()
    """Parameters that another part holds, too: there they count for the norm."""

    def rank(self, worker: int) -> int:
        return worker * self.parts + self.part


WHOLE = PartOf()


class Spec(Message, frozen=True):
    """What one server holds of a model, and by which rule; the same from every worker.

    Where the parts of a replica have one lead, `index` and `servers` count those of all parts.
    """

    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    servers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    lead: Annotated[str, msgspec.Meta(max_length=512)]
    rule: Rule
    dtype: Dtype
    head_dtype: Dtype
    size: Count  # elements of a worker's flat buffer
    start: Count
    stop: Count
    parameters: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    cuts: Annotated[tuple[Cut, ...], msgspec.Meta(max_length=1 << 20)]
    microbatches: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] | None = None  # exact: leaves
    optimizer: Named | None = None  # None: the workers update
    clip_norm: float | None = None
    compress: Annotated[str, msgspec.Meta(max_length=64)] | None = None  # how gradients travel
    is_part: bool = False  # of a model: the workers tell the norm of the whole gradient
    place: PartOf = WHOLE


class Commit(Message, frozen=True):
    """A push is whole: `share` of the global batch, computed for `step` on `version`."""

    step: Count
    version: Count
    share: float
    lr: float | None = None


class Ack(Message, frozen=True):
    verdict: Literal["admitted", "folded", "dropped", "staged", "again"]
    position: Count


class Pull(Message, frozen=True):
    """Weights for `step`, not older than `version`; `step=None` takes them as they are."""

    step: Count | None
    version: Count


class Pulled(Message, frozen=True):
    version: Count
    slowest: Count | None  # the clock of the slowest live worker, where the lead answers
    fastest: Count | None  # and of the fastest


class Value(Message, frozen=True):
    """A tensor of the payload: the weights of a cutting, or one entry of its optimizer state."""

    cut: Count
    key: Annotated[str, msgspec.Meta(max_length=256)]
    dtype: AnyDtype
    shape: Shape


class State(Message, frozen=True):
    """Tensors in the payload, one after the other, and plain numbers here."""

    steps: Count
    tensors: Annotated[tuple[Value, ...], msgspec.Meta(max_length=1 << 22)]
    numbers: tuple[tuple[Count, str, bool | int | float | None], ...] = ()
    weights: bool = True
    options: tuple[Annotated[dict[str, Option], msgspec.Meta(max_length=64)], ...] = ()  # of groups


class Rows(Message, frozen=True):
    """So many ids in the payload, int64; with gradients behind them where rows are pushed."""

    table: Name
    count: Count
    lr: float = 0.0


class Chunk(Message, frozen=True):
    """Rows of a table as saved: ids, then a tensor for each of `keys`. Without keys: start anew."""

    table: Name
    count: Count
    keys: Annotated[tuple[Name, ...], msgspec.Meta(max_length=16)]
    steps: Count


class Kept(Message, frozen=True):
    """Whether a worker has left what it carries from step to step; it is the payload."""

    there: bool


class Meet(Message, frozen=True):
    number: Count


class Met(Message, frozen=True):
    """`first` is the first of the workers that are left; all that met are told the same."""

    first: Count


class Stats(Message, frozen=True):
    """Ask for the counts; with `final`, once nobody works any more."""

    final: bool = False


class Entry(Message, frozen=True):
    """A decision of the lead. Every server carries out the same ones in the same order."""

    position: Count
    kind: Literal["admit", "drop", "apply", "restart"]
    worker: Count = 0
    sequence: Count = 0
    version: Count = 0
    lr: float | None = None
    divisor: float = 1.0
    bound: float | None = None


class Norms(Message, frozen=True):
    """The norms of the gradients that one server holds, or all of them, for clipping."""

    values: tuple[float, ...]


class Factor(Message, frozen=True):
    value: float


class Norm(Message, frozen=True):
    """The norm of the whole gradient, of which this model is a part."""

    value: float
