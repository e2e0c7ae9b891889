"""A step of one worker as data: what it holds, what it exchanges with the other replicas.

    zero(2) of 4, rank 0     held       parameters 1, gradients 1/4, optimizer 1/4
                             exchanges  gradients: reduce, as backward goes on
                                        weights: broadcast, after the update

Plans, `shoal memory` and `shoal explain` read it; the tests compare it with what a worker holds and
with what its group counts as sent.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import NamedTuple


class What(enum.StrEnum):
    """What is held or sent. Each byte is one of them."""

    PARAMETERS = "parameters"  # with buffers and frozen ones
    GRADIENTS = "gradients"  # buffers, and gradients that wait at their parameters
    OPTIMIZER = "optimizer"  # its state
    GATHERED = "gathered"  # parameters of other workers, for a moment
    COPIES = "copies"  # further tensors of the strategy, such as anchors and mixing buffers
    RESIDUALS = "residuals"  # what compression carries from step to step
    IN_FLIGHT = "in_flight"  # messages on their way
    SHARED = "shared"  # segments that other processes see and that hold nothing of the above
    SERVER = "server"  # all that a parameter server holds which lives in this worker


class Where(enum.Enum):
    """On which memory something lies, and who updates."""

    WORKER = "worker"
    HOST = "host"  # of a worker whose model is on a GPU
    SERVER = "server"


class When(enum.Enum):
    """The moment of a step in which an exchange begins."""

    IN_BACKWARD = "in backward"  # bucket by bucket
    AFTER_BACKWARD = "after backward"
    BEFORE_UNIT = "before a unit"  # of zero(3), in forward and in backward
    AFTER_UPDATE = "after the update"


class Waits(NamedTuple):
    """For whom a worker waits before it goes on."""

    replicas: float | None = None  # so many pushes: quorum; None: those of all
    steps: int = 0  # it may be so many steps ahead of the slowest: staleness
    neighbours: bool = False  # only for those next to it in a graph


NO_WAIT = Waits(replicas=0)
BARRIER = "barrier"  # the kind of an exchange without bytes


class Held(NamedTuple):
    """Bytes of one kind that a worker has at its fullest, activations aside."""

    what: What
    num_bytes: float
    where: Where = Where.WORKER


class Messages(NamedTuple):
    """Equal calls of an exchange."""

    number: float
    num_bytes: float  # of what is exchanged, each: the whole tensor, whatever a rank sends of it


class Exchange(NamedTuple):
    """What the replicas of a worker send each other.

    `kind` is a collective, push, pull, mix, or share: of one memory, where nothing is sent.
    """

    what: What
    kind: str
    messages: tuple[Messages, ...]
    when: When
    waits: Waits = Waits()
    every: int = 1  # steps
    delay: int = 0  # steps after which what has arrived is used
    times: float = 1.0  # in a step: of each micro-batch
    among: str = "dp"  # the axis of the mesh
    algorithm: str | None = None  # of the collective; None: the cheapest one
    graph: str = ""  # of those that mix
    packing: float = 0.0  # bytes that are read and written to pack it, in a step
    room: float = math.inf  # bytes of buckets under way, where a further one stops backward

    @property
    def num_bytes(self) -> float:
        """Of a step."""
        of_all = sum(calls.number * calls.num_bytes for calls in self.messages)
        return self.times * of_all / self.every

    def sent_bytes(self, ranks: int) -> float:
        """By a worker in a step: the mean over the ranks, by the schedule that sends the least."""
        if self.kind not in _SENT:
            return 0.0 if self.kind in ("pull", "share") else self.num_bytes
        part = 1 / ranks if self.kind in ("gather", "scatter") else 1.0
        return _SENT[self.kind] * part * self.num_bytes * (ranks - 1) / ranks


_SENT = {  # of the bytes of a call, times (ranks - 1) / ranks
    **dict.fromkeys(("reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"), 1.0),
    **dict.fromkeys(("gather", "scatter"), 1.0),
    "all_reduce": 2.0,
}


class Passes(NamedTuple):
    """Bytes that a worker reads and writes beside its update."""

    name: str  # of this part of the step
    num_bytes: float
    every: int = 1  # steps


class HostCopy(NamedTuple):
    """Bytes that a worker copies in a step between its device and its host's memory."""

    kind: str  # up: to the device; down
    num_bytes: float
    when: When


class StepSchedule(NamedTuple):
    """What one worker holds and exchanges in a step."""

    held: tuple[Held, ...]
    exchanges: tuple[Exchange, ...] = ()
    updates: Where = Where.WORKER
    updated: float = 0.0  # elements of the parameters that this worker updates
    servers: tuple[float, ...] = ()  # bytes of each server process
    passes: tuple[Passes, ...] = ()
    host_copies: tuple[HostCopy, ...] = ()

    @property
    def waits(self) -> Waits:
        """Of its first exchange; a strategy that exchanges nothing has no waits."""
        return self.exchanges[0].waits if self.exchanges else Waits()

    def bytes_of(self, what: What) -> float:
        """On the worker's device."""
        return sum(held.num_bytes for held in self.held if held[::2] == (what, Where.WORKER))

    @property
    def host_bytes(self) -> float:
        return sum(held.num_bytes for held in self.held if held.where is Where.HOST)

    def sent_bytes(self, ranks: int) -> float:
        return sum(exchange.sent_bytes(ranks) for exchange in self.exchanges)


Sizes = Mapping[What, float]


def held_of(sizes: Sizes, where: Where = Where.WORKER) -> tuple[Held, ...]:
    """What takes memory there."""
    return tuple(Held(what, num_bytes, where) for what, num_bytes in sizes.items() if num_bytes)
