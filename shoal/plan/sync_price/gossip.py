"""gossip: after its own update a replica averages its weights with its neighbours in a graph.

Messages between the same two levels of the cluster share its links: a node's NICs carry what its
workers send to other nodes, a rack's uplinks what its nodes send to other racks. Nothing of it is
hidden. Asynchronous replicas of one host read their neighbours' last weights from shared memory;
on several a pair sends each other its weights, one after the other. The second eigenvalue of the
mixing matrix gives what gossip costs in progress.

hogwild: workers update one copy of the weights in shared memory, without locks.

Each worker computes a global batch of its own. No worker waits for another, so the rate is the sum
of their own rates, until the host's memory carries no more: an update reads and writes the shared
weights, and every forward and backward reads what others have just written.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.cluster import Cluster
from shoal.cluster.hardware import alphas_at_once
from shoal.errors import BadInput
from shoal.plan.prediction import Part
from shoal.plan.step.collective_time import RankGroup, hops
from shoal.plan.step.stragglers import neighbours_pace, own_pace
from shoal.plan.sync_price import NO_PART, SyncPrice, SyncQuestion, some
from shoal.schedules.buffer_layout import MIXING_CHUNK_BYTES
from shoal.schedules.mixing import MAX_WORKERS, Edges, edges_for, mixing_for


class MixedMessages(NamedTuple):
    """One step of a graph on a cluster, in messages; the mean over its period."""

    of_port: float  # of the busiest worker, in or out
    of_node: float  # that leave or enter the busiest node
    of_rack: float  # that leave or enter the busiest rack
    sent: float  # by a worker, the mean


mixing_of = lru_cache(maxsize=256)(mixing_for)


def gossip(term: Any, question: SyncQuestion) -> SyncPrice:
    if question.replicas == 1:
        return SyncPrice((question.update_part(),))
    exchange = exchange_of(term.graph, question.group, question.cluster)
    is_async = term.mode == "async"
    is_shared = is_async and question.on_one_host
    if is_async and not is_shared:  # with one that it draws, and with one that draws it
        exchange = MixedMessages(*(2 / exchange.of_port * messages for messages in exchange))
    mixed = _shared_pages(question, exchange) if is_shared else _messages(question, exchange)
    copies = question.rollback_part(1) if _returns(term) else NO_PART
    if _returns(term):  # weights and optimizer state, in each step, which a barrier ends
        barrier_s = question.collective("all_reduce", 1).seconds + question.meetings_s(1)
        copies = copies._replace(seconds=copies.seconds + barrier_s)
    noise, each = question.cluster.noise, question.each
    pace = own_pace(noise, each)
    if not is_async:
        pace = neighbours_pace(noise, term.graph, question.replicas, each)
    waits_s = (pace - 1) * question.compute_s
    update = question.update_part()
    if is_async:
        step_s = question.compute_s + waits_s + mixed.seconds + update.seconds
        waits_s += question.mean_step_s(step_s) - step_s
    elif not term.lockstep:  # in the end all have the pace of the slowest
        waits_s = max(waits_s, question.latest_s)
    waiting = Part("stragglers", waits_s, "noise of workers")
    parts = some(mixed, copies, waiting, update)
    return SyncPrice(
        parts,
        convergence=convergence_of(term.graph, question.replicas),
        sent_bytes=question.buffer_bytes * (1.0 if is_shared else exchange.sent),
        spread_s=(0.0, 0.0) if is_async else question.synchronous_spread(),
    )


@lru_cache(maxsize=256)
def convergence_of(graph: str, replicas: int) -> str:
    """How fast replicas agree, in a sentence; "" for more of them than gossip runs on."""
    if replicas > MAX_WORKERS:
        return ""
    mixing = mixing_of(graph, replicas)
    gap = 1 - mixing.second_eigenvalue
    return mixing.expectation + (f" (spectral gap {gap:.3g})" if gap < 1 else "")


@lru_cache(maxsize=512)
def exchange_of(graph: str, group: RankGroup, cluster: Cluster) -> MixedMessages:
    steps = [_step(edges, group, cluster) for edges in edges_for(graph, group.size)]
    return MixedMessages(*(sum(column) / len(steps) for column in zip(*steps, strict=True)))


def _step(edges: Edges, group: RankGroup, cluster: Cluster) -> MixedMessages:
    heard, hears = edges
    node = np.arange(group.size) * group.stride // cluster.node.devices
    rack = node // (cluster.nodes_per_rack or cluster.nodes)
    beside = min(group.stride, cluster.node.devices)  # groups of a node that do the same
    beside_in_rack = min(group.stride, cluster.node.devices * (cluster.nodes_per_rack or 1))
    return MixedMessages(
        _busiest(np.arange(group.size), hears, heard),
        beside * _busiest(node, hears, heard),
        beside_in_rack * _busiest(rack, hears, heard),
        len(hears) / group.size,
    )


def _busiest(place: NDArray[np.int64], hears: Any, heard: Any) -> float:
    """The most messages that enter or leave one place."""
    crosses = place[hears] != place[heard]
    if not crosses.any():
        return 0.0
    out = np.bincount(place[heard][crosses]).max()
    into = np.bincount(place[hears][crosses]).max()
    return float(max(out, into))


def _messages(question: SyncQuestion, exchange: MixedMessages) -> Part:
    """The slowest of ports, NICs and uplinks, and the weighted sum."""
    node, cluster = question.node, question.cluster
    message = question.parameter_bytes
    way = hops(cluster, question.group)
    message_s = message / way[0].bytes_per_s
    if any(calls.kind == "send" for calls in node.measured):  # in chunks
        chunk = min(message, float(MIXING_CHUNK_BYTES))
        message_s = message / max(1.0, chunk) * question.send(chunk).seconds
    candidates = [(exchange.of_port * message_s, way[0].words)]
    if exchange.of_node and node.nic is not None:
        node_s = exchange.of_node * message / (node.nics * node.nic.rate)
        candidates.append((node_s, way[-1].words))
        nodes = cluster.nodes_per_rack or cluster.nodes
        uplinks = nodes * node.nics * node.nic.rate / cluster.oversubscription
        candidates.append((exchange.of_rack * message / uplinks, way[-1].words))
    seconds, bound = max(candidates)
    alpha_s = alphas_at_once(max(hop.alpha_s for hop in way), exchange.of_port)
    return Part("neighbours", alpha_s + seconds + _sum_s(question, exchange), bound)


def _sum_s(question: SyncQuestion, exchange: MixedMessages) -> float:
    """A term of the sum is read, added and written; the result is copied."""
    message = question.parameter_bytes
    chunk = max(1.0, min(message, float(MIXING_CHUNK_BYTES)))
    passes = 3 * (exchange.of_port + 1)
    cached_s = message / chunk * passes * question.device.pass_s(3 * chunk) / 3
    return cached_s + question.device.pass_s(2 * message)


def _shared_pages(question: SyncQuestion, exchange: MixedMessages) -> Part:
    """A replica writes its page, and reads those of its neighbours."""
    moved = 2 * (1 + exchange.of_port) * question.parameter_bytes
    alone_s = question.device.pass_s(moved) + _sum_s(question, exchange)
    bus = question.node.memory_bytes_per_s
    if bus is not None:
        alone_s = max(alone_s, question.workers * moved / bus)
    return Part("neighbours", alone_s, "memory of the host")


def _returns(term: Any) -> bool:
    """Whether a step is undone after a loss: where weights are averaged in an elastic run."""
    return bool(term.elastic and not term.lockstep)


_READS = 2  # of the shared weights in a step: forward and backward


def hogwild(term: Any, question: SyncQuestion) -> SyncPrice:
    """One worker's step, in which the others finish a batch each as well."""
    if not question.on_one_host:
        raise BadInput(
            f"hogwild goes through the memory of one host, and {question.workers} workers need "
            f"several nodes of {question.cluster.name}, which have {question.node.devices} "
            "devices each"
        )
    replicas = question.replicas
    pace = own_pace(question.cluster.noise, question.each)
    update = question.update_part()
    own_s = question.mean_step_s(question.compute_s * pace + update.seconds)
    bus = question.node.memory_bytes_per_s
    moved = (_READS + 2) * question.parameter_bytes + question.gradient_bytes
    moved += 2 * question.state_bytes  # of the host's memory, by one worker's batch
    bus_s = moved / bus if bus is not None and replicas > 1 else 0.0
    waits_s = max(0.0, replicas * bus_s - own_s)
    parts = some(
        Part("stragglers", own_s - update.seconds - question.compute_s, "noise of workers"),
        Part("shared weights", waits_s, "memory of the host"),
        update,
    )
    behind = f"a gradient is about {replicas - 1} updates old when it is used" * (replicas > 1)
    return SyncPrice(parts, convergence=behind)
