"""Decentralized training: every replica averages with its neighbours in a graph only.

    step t, replica i       x_i <- update(x_i, gradient of i's samples)       on its own
                            x_i <- sum over neighbours j of w[i, j] x_j       one message each way

A step sends the parameters once to every listener: on a ring 2n bytes for n bytes of parameters,
whatever the number of workers. The loss travels in front of them.

Where all weights are equal (the complete graph, and a ring of two or three) replicas are equal
after every step, and average their gradients before the update instead of their weights after
it. It costs the same bytes, and it is ddp for every optimizer; averaged weights are so only for
those that are linear in the gradient, which AdamW and clipping are not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.call import PeerMessage
from shoal.comm.group import Group, Op
from shoal.comm.objects import all_equal, broadcast_bytes
from shoal.comm.transport.transport import Work
from shoal.errors import BadInput
from shoal.runtime import clock
from shoal.runtime.trace import MIX, WAIT
from shoal.runtime.wording import counted
from shoal.schedules.buffer_layout import DEFAULT_BUCKET_BYTES, MIXING_CHUNK_BYTES
from shoal.schedules.mixing import Mixing, mixing_for
from shoal.strategy.sync_terms import Gossip
from shoal.sync import Replica, StepTraffic, Sync, SyncPlan, runs
from shoal.sync.ddp import LocalSync
from shoal.sync.gossip_async import AsyncGossip
from shoal.sync.lasting import comes_back
from shoal.sync.replica_mean import averaged, mean_state
from shoal.sync.shared_weights import build_shared
from shoal.sync.weight_slots import WeightSlots

MEASURE_EVERY = 50  # steps from one measurement of the distance between replicas to the next
MEASURE_EARLY = (1, 5, 20)  # so that a short run that is traced has a line of them
TAG = 0x60551

_BLOCK = 1 << 16  # elements


class Neighbours:
    """Takes weighted sums over neighbours, by messages to and from them alone."""

    def __init__(self, group: Group, mixing: Mixing):
        self.group = group
        self.mixing = mixing
        self._landing: dict[tuple[int, int], Tensor] = {}  # by position among peers (-1: the sum)

    def mix(self, data: Tensor, step: int) -> None:
        """`data` becomes the weighted sum of the neighbours' and its own; chunk by chunk.

        Terms go in the order of ranks, so that equal weights give equal bits everywhere.
        """
        weights = self.mixing.heard_by(self.group.rank, step)
        listeners = self.mixing.listeners(self.group.rank, step)
        before: Callable[[], None] | None = None
        for turn, chunk in enumerate(torch.split(data, MIXING_CHUNK_BYTES // data.element_size())):
            work, terms = self._exchange(chunk, weights, listeners, turn % 2)
            if before is not None:
                before()
            before = partial(self._settle, chunk, work, terms)
        if before is not None:
            before()

    def _exchange(
        self, chunk: Tensor, weights: dict[int, float], listeners: Sequence[int], turn: int
    ) -> tuple[Work, list[tuple[float, Tensor]]]:
        rank = self.group.rank
        terms = []
        receives = []
        for peer in sorted(weights):
            if peer == rank:
                terms.append((weights[rank], chunk))
                continue
            landing = self._buffer(len(terms), turn, chunk)
            receives.append(PeerMessage(landing, peer, TAG))
            terms.append((weights[peer], landing))
        sends = [PeerMessage(chunk, peer, TAG) for peer in sorted(listeners) if peer != rank]
        return self.group.exchange(sends, receives), terms

    def _buffer(self, position: int, turn: int, like: Tensor) -> Tensor:
        buffer = self._landing.get((position, turn))
        if buffer is None or buffer.numel() < like.numel() or buffer.dtype != like.dtype:
            buffer = self._landing[position, turn] = torch.empty_like(like)
        return buffer[: like.numel()]

    def _settle(self, chunk: Tensor, work: Work, terms: list[tuple[float, Tensor]]) -> None:
        work.wait()
        total = self._buffer(-1, 0, chunk).zero_()
        for weight, term in terms:
            total.add_(term, alpha=weight)
        chunk.copy_(total)


class Mixer(Sync):
    """What both ways to average have. `statistics` are running ones of BatchNorm."""

    mixes_gradients: bool

    traffic: StepTraffic

    def __init__(self, replica: Replica, mixing: Mixing, graph: str):
        flat = replica.flat
        self.flat = flat
        self.update = replica.update
        self.statistics = replica.statistics
        self.traffic = StepTraffic()
        self._replicas = replica.group
        self._graph = graph
        self._say = replica.say
        self._connect(mixing)
        self.distances: list[tuple[int, float]] = []
        self.heard_loss: Tensor | None = None
        flat.grads.records_loss = True
        if self.mixes_gradients:
            flat.grads.watch([slice(0, flat.size)])

    def _connect(self, mixing: Mixing) -> None:
        self.mixing = mixing
        self.group = self.traffic.count(self.flat, self._replicas)
        self.neighbours = Neighbours(self.group, mixing)
        self.turn = 0  # the step in the sequence of matrices
        self.gradient_scale = float(self.group.size)  # the mean over replicas is the sum

    def regroup(self) -> None:
        """The same graph over the replicas that there are now; its sequence begins again."""
        self._connect(mixing_for(self._graph, self._replicas.size))
        if self.group.size > 1:
            self._say(f"gossip over {self.mixing.expectation}")

    def _count_step(self) -> None:
        self.traffic.steps += 1
        self.turn += 1

    @contextmanager
    def full_weights(self, optimizer: bool = False) -> Iterator[None]:
        """Replicas that mix gradients have the same weights and optimizers."""
        weights = [] if self.mixes_gradients else [self.flat.data]
        is_same = self.mixes_gradients or not optimizer
        with (
            self.traffic.uncounted(),
            averaged([*weights, *self.statistics], self.group),
            nullcontext() if is_same else mean_state(self.update.optimizer, self.group),
        ):
            yield

    def report(self) -> dict[str, Any]:
        return {
            **described(self.mixing),
            **self.traffic.report(),
            "consensus_distance": [list(pair) for pair in self.distances],
        }


class MixGradients(Mixer):
    """Gradients are averaged with equal weights, by messages to all others, before the update."""

    mixes_gradients = True

    def collect(self) -> None:
        peers = f"average gradients with {self.group.size - 1} others"
        with self.update.tracer.span(MIX, peers):
            for tensor in self.flat.grads.tensors[0]:
                self.neighbours.mix(tensor, self.turn)
        self.flat.grads.publish()
        self._count_step()

    def loss(self, local_loss: Tensor) -> Tensor:
        return self.flat.grads.header[0] * self.group.size


class MixWeights(Mixer):
    """Each replica updates with its own gradients, then averages its weights with its neighbours'.

    The weights that count are the mean of all replicas, and so are BatchNorm's statistics and, in
    a checkpoint, the optimizer's state. Every 50 steps the distance between replicas is measured,
    with an all-reduce that is not counted as traffic; in a run with a trace also after a few.
    """

    mixes_gradients = False
    collects = False

    def spread(self) -> None:
        with self.update.tracer.span(MIX, f"average weights with neighbours, {self.mixing.name}"):
            self.mix()
        self._count_step()
        is_early = self.update.tracer.enabled and self.turn in MEASURE_EARLY
        if self.turn % MEASURE_EVERY == 0 or is_early:
            self.measure()

    def loss(self, local_loss: Tensor) -> Tensor:
        """The loss of the neighbours' samples and its own, weighted as their weights are."""
        return local_loss * self.group.size if self.heard_loss is None else self.heard_loss

    def measure(self) -> float:
        """How far replicas are from their mean, in root mean square; all ranks call it."""
        start_ns = clock.monotonic_ns()
        with self.traffic.uncounted(), self.update.tracer.sent.uncounted():
            mean = self.flat.data.clone()
            self.group.all_reduce(mean, Op.MEAN).wait()
            blocks = torch.split(mean.sub_(self.flat.data), _BLOCK)  # which stay in a cache
            apart = torch.stack([block.double().square().sum() for block in blocks]).sum()
            self.group.all_reduce(apart, Op.MEAN).wait()
        distance = math.sqrt(float(apart))
        self.distances.append((self.traffic.steps, distance))
        end_ns = clock.monotonic_ns()
        self.update.tracer.add(WAIT, start_ns, end_ns, "main", f"consensus distance {distance:.4g}")
        return distance

    def summary(self) -> list[str]:
        if not self.distances:
            return []
        (first, far) = self.distances[0]
        (last, near) = self.distances[-1]
        return [
            f"gossip: replicas were {far:.3g} from their mean after {counted(first, 'step')}"
            + (f", {near:.3g} after {last}" if last > first else "")
        ]

    def mix(self) -> None:
        if not self.flat.header_fits:
            self.neighbours.mix(self.flat.data, self.turn)
            return
        data = self.flat.data  # starts with the room for the header
        data[0] = self.flat.grads.header[0] * self.group.size
        self.neighbours.mix(data, self.turn)
        self.heard_loss = data[0].clone()
        data[0] = 0.0


class MixInPlace(MixWeights):
    """On one host: the loss travels in messages, and weights are read where they are."""

    def __init__(self, replica: Replica, mixing: Mixing, graph: str, slots: WeightSlots):
        super().__init__(replica, mixing, graph)
        self._slots = slots
        self._head = torch.zeros_like(self.flat.grads.header[:1])

    def mix(self) -> None:
        """The message tells that this replica has updated, and has mixed in the step before."""
        self._head[0] = self.flat.grads.header[0] * self.group.size
        with self.traffic.uncounted():
            self.neighbours.mix(self._head, self.turn)
            if not self.mixing.is_mutual:  # who reads these weights sends no message
                self.group.barrier().wait()
        self.heard_loss = self._head[0].clone()
        rank = self.group.rank
        self._slots.mix(self.mixing.heard_by(rank, self.turn), self.turn)
        listeners = self.mixing.listeners(rank, self.turn)
        self.traffic.total += self.flat.data.nbytes * len(listeners)

    def elsewhere(self) -> list[Tensor]:
        return self._slots.of_neighbours()


class ElasticMixWeights(MixWeights):
    """The same where workers leave and join: a step ends with a barrier of all replicas.

    Far from a lost worker a replica would otherwise be steps ahead of those next to it. With the
    barrier either one of them has ended a step, then all have averaged in it, or none has.
    """

    undo_steps = 1

    def commit(self) -> None:
        self.is_committing = True
        self.group.barrier().wait()
        self.is_committing = False


@runs(Gossip)
class GossipPlan(SyncPlan[Gossip]):
    def build(self, replica: Replica) -> Sync:
        """Read the graph, say what is to be expected of it, and choose how to mix."""
        graph = self.term.graph
        mixing = mixing_for(graph, replica.group.size)
        if self.term.elastic:  # what is averaged stays the same at any number of workers
            return (MixGradients if self.term.lockstep else ElasticMixWeights)(
                replica, mixing, graph
            )
        if replica.group.size == 1:
            return LocalSync(replica)
        if not _is_same(mixing, replica):
            raise BadInput(
                f"{self.term}: not all ranks have the same graph; give all hosts the same file "
                "and the same version of networkx"
            )
        replica.say(f"gossip over {mixing.expectation}")
        if self.term.mode == "async":
            return _asynchronous(replica, mixing)
        if (shared := self._shared(replica, mixing)) is not None:
            return shared
        return (MixGradients if mixing.is_uniform else MixWeights)(replica, mixing, graph)

    def _shared(self, replica: Replica, mixing: Mixing) -> Sync | None:
        """On one host; where all weights are equal it is ddp, which several hosts share, too."""
        wanted = self.term.shared_weights
        if not mixing.is_uniform:
            slots = WeightSlots.of(replica, mixing, wanted)
            return None if slots is None else MixInPlace(replica, mixing, self.term.graph, slots)
        buckets = replica.flat.buckets(DEFAULT_BUCKET_BYTES)
        if (shared := build_shared(replica, buckets, wanted)) is not None:
            shared.about = {**described(mixing), "consensus_distance": []}
        return shared


def described(mixing: Mixing) -> dict[str, Any]:
    return {"graph": mixing.name, "second_eigenvalue": mixing.second_eigenvalue}


def _asynchronous(replica: Replica, mixing: Mixing) -> Sync:
    """Through the memory of one host, or by messages between several."""
    from shoal.server.client.discovery import introduce
    from shoal.sync.gossip_pairs import PairwiseGossip

    met = introduce(replica.group, replica.replica_group, replica.config)
    if len(met.topology.hosts) == 1:
        return AsyncGossip(replica, mixing)
    return PairwiseGossip(replica, mixing, met.announcer.secret)


def _is_same(mixing: Mixing, replica: Replica) -> bool:
    """Whether all ranks have this graph: files may differ, and so may versions of networkx."""
    data = b"".join(matrix.tobytes() for matrix in mixing.matrices)
    if not comes_back(replica):
        return all_equal(replica.group, data)
    digest = hashlib.sha256(data).hexdigest().encode()
    return broadcast_bytes(replica.group, digest, 0) == digest
