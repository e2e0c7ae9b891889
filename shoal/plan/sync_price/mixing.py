"""Replicas that average their weights with their neighbours in a graph.

Messages between the same two levels of the cluster share its links: a node's NICs carry what its
workers send to other nodes, a rack's uplinks what its nodes send to other racks. Nothing of it is
hidden. Asynchronous replicas of one host read their neighbours' last weights from shared memory;
on several a pair sends each other its weights, one after the other. The second eigenvalue of the
mixing matrix gives what it costs in progress.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.cluster import Cluster
from shoal.cluster.hardware import alphas_at_once
from shoal.plan.prediction import Part
from shoal.plan.step.collective_time import RankGroup, hops
from shoal.plan.sync_price import SyncQuestion
from shoal.schedules.buffer_layout import MIXING_CHUNK_BYTES
from shoal.schedules.mixing import MAX_WORKERS, Edges, edges_for, mixing_for
from shoal.schedules.steps.step import NO_WAIT, Exchange


class MixedMessages(NamedTuple):
    """One step of a graph on a cluster, in messages; the mean over its period."""

    of_port: float  # of the busiest worker, in or out
    of_node: float  # that leave or enter the busiest node
    of_rack: float  # that leave or enter the busiest rack


def mixed(question: SyncQuestion, exchange: Exchange) -> Part:
    messages = _messages_of(exchange.graph, question.group, question.cluster)
    if exchange.waits == NO_WAIT and question.on_one_host:
        return _shared_pages(question, messages)
    if exchange.waits == NO_WAIT:  # with one that it draws, and with one that draws it
        drawn = exchange.messages[0].number / messages.of_port
        messages = MixedMessages(*(drawn * number for number in messages))
    return _sent(question, messages)


@lru_cache(maxsize=256)
def convergence_of(graph: str, replicas: int) -> str:
    """How fast replicas agree, in a sentence; "" for more of them than gossip runs on."""
    if replicas > MAX_WORKERS:
        return ""
    mixing = mixing_for(graph, replicas)
    gap = 1 - mixing.second_eigenvalue
    return mixing.expectation + (f" (spectral gap {gap:.3g})" if gap < 1 else "")


@lru_cache(maxsize=512)
def _messages_of(graph: str, group: RankGroup, cluster: Cluster) -> MixedMessages:
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
    )


def _busiest(place: NDArray[np.int64], hears: Any, heard: Any) -> float:
    """The most messages that enter or leave one place."""
    crosses = place[hears] != place[heard]
    if not crosses.any():
        return 0.0
    out = np.bincount(place[heard][crosses]).max()
    into = np.bincount(place[hears][crosses]).max()
    return float(max(out, into))


def _sent(question: SyncQuestion, messages: MixedMessages) -> Part:
    """The slowest of ports, NICs and uplinks, and the weighted sum."""
    node, cluster = question.node, question.cluster
    message = question.parameter_bytes
    way = hops(cluster, question.group)
    message_s = message / way[0].bytes_per_s
    if any(calls.kind == "send" for calls in node.measured):  # in chunks
        chunk = min(message, float(MIXING_CHUNK_BYTES))
        message_s = message / max(1.0, chunk) * question.collective("send", chunk).seconds
    candidates = [(messages.of_port * message_s, way[0].words)]
    if messages.of_node and node.nic is not None:
        node_s = messages.of_node * message / (node.nics * node.nic.rate)
        candidates.append((node_s, way[-1].words))
        nodes = cluster.nodes_per_rack or cluster.nodes
        uplinks = nodes * node.nics * node.nic.rate / cluster.oversubscription
        candidates.append((messages.of_rack * message / uplinks, way[-1].words))
    seconds, bound = max(candidates)
    alpha_s = alphas_at_once(max(hop.alpha_s for hop in way), messages.of_port)
    return Part("neighbours", alpha_s + seconds + _sum_s(question, messages), bound)


def _sum_s(question: SyncQuestion, messages: MixedMessages) -> float:
    """A term of the sum is read, added and written; the result is copied."""
    message = question.parameter_bytes
    chunk = max(1.0, min(message, float(MIXING_CHUNK_BYTES)))
    passes = 3 * (messages.of_port + 1)
    cached_s = message / chunk * passes * question.device.pass_s(3 * chunk) / 3
    return cached_s + question.device.pass_s(2 * message)


def _shared_pages(question: SyncQuestion, messages: MixedMessages) -> Part:
    """A replica writes its page, and reads those of its neighbours."""
    moved = 2 * (1 + messages.of_port) * question.parameter_bytes
    alone_s = question.device.pass_s(moved) + _sum_s(question, messages)
    bus = question.node.memory_bytes_per_s
    if bus is not None:
        alone_s = max(alone_s, question.workers * moved / bus)
    return Part("neighbours", alone_s, "memory of the host")
