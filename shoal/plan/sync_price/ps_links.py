"""What pushes and pulls take between workers and parameter servers.

    shared memory   gradients lie where servers see them; each server adds up its slice with a core
                    of its own, and all of them share the host's memory bus
    network         every worker sends through its node's NICs; the servers' NICs receive what all
                    workers send (incast), and so do the uplinks of the servers' rack

The slowest of these sets the pace. `workers` as placement divides the model over all workers, and
so does away with the incast.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from shoal.cluster.cluster import Cluster
from shoal.cluster.hardware import Device
from shoal.cluster.units import show_rate
from shoal.plan.sync_price.base import SyncQuestion, computes_on_cores
from shoal.runtime.cores import most_server_threads, server_threads

_PASSES_TO_ADD = 3  # a push is read, and so is the sum, which is written


class Way(NamedTuple):
    """One direction of one step: all pushes, or all pulls."""

    seconds: float  # until the last of all workers is through
    alone_s: float  # of one worker while no other sends
    service_s: float  # of the busiest server's time that one worker takes
    bound: str


class Traffic(NamedTuple):
    """Bytes of one direction of a step."""

    of_worker: float  # that leave a worker for servers elsewhere
    into_server: float  # that the busiest server gets from elsewhere


def server_count(term: Any, question: SyncQuestion) -> int:
    return question.workers if term.placement == "workers" else int(term.servers)


def process_count(term: Any, question: SyncQuestion) -> int:
    """Servers and their replicas."""
    return server_count(term, question) * int(term.replicas)


def step_traffic(term: Any, question: SyncQuestion, message_bytes: float) -> Traffic:
    """`message_bytes` go from every worker to all servers together.

    A server that lives in a worker gets that worker's part without a message.
    """
    workers = question.workers
    if term.placement == "rank0":
        inside = message_bytes * question.each  # of the first replica's workers
        total = message_bytes * workers
        return Traffic(message_bytes * (1 - 1 / question.replicas), total - inside)
    if term.placement == "workers":
        slices = question.replicas
        others = message_bytes * (slices - 1) / slices
        return Traffic(others, others)
    return Traffic(message_bytes, message_bytes * workers / term.servers)


def way(term: Any, question: SyncQuestion, message_bytes: float, passes: int) -> Way:
    """`passes` over its bytes is what a server does with a message."""
    cluster = question.cluster
    if question.workers <= cluster.node.devices:
        return _shared_memory(term, question, message_bytes, passes)
    return _network(term, question, message_bytes, passes)


def push(term: Any, question: SyncQuestion, message_bytes: float) -> Way:
    """All replicas of a server work on a push; on one host they share its memory."""
    is_one_host = question.workers <= question.cluster.node.devices
    replicas = 1 if is_one_host else int(term.replicas)
    return way(term, question, message_bytes, _push_passes(term) // replicas)


def pull(term: Any, question: SyncQuestion, message_bytes: float) -> Way:
    return way(term, question, message_bytes, 2)


def chain_s(term: Any, question: SyncQuestion, message_bytes: float) -> float:
    """What a push takes along the chain, from the first replica to the last, and back.

    A replica passes a push on when it has all of it; over a network its bytes travel with it.
    """
    hops = int(term.replicas) - 1
    if not hops or term.consistency == "eventual":
        return 0.0
    node = question.cluster.node
    if question.workers <= node.devices or node.nic is None:
        alpha_s = 0.0 if node.fabric is None else node.fabric.alpha_s
        return 2 * hops * alpha_s
    share = message_bytes / server_count(term, question)
    return hops * (2 * node.nic.alpha_s + share / (node.nics * node.nic.rate))


def _push_passes(term: Any) -> int:
    """Over the bytes of a push, by all replicas; each keeps a copy until the push has arrived."""
    copies = 2 if term.replicas > 1 else 0
    return int(term.replicas) * (_PASSES_TO_ADD + copies)


def _bus(cluster: Cluster) -> float:
    """Bytes a second of the host's memory, which servers and CPU workers share."""
    if cluster.node.memory_bytes_per_s is not None:
        return cluster.node.memory_bytes_per_s
    return cluster.device.memory_bytes_per_s * cluster.node.devices


def server_hosts(term: Any, question: SyncQuestion) -> int:
    """Hosts that servers are on: that of the workers, or one for each process, or all."""
    devices = question.cluster.node.devices
    if question.workers <= devices or term.placement == "rank0":
        return 1
    return (
        process_count(term, question)
        if term.placement == "servers"
        else -(-question.workers // devices)
    )


def host_rate(term: Any, question: SyncQuestion, num_bytes: float) -> float:
    """Bytes a second at which the servers of one host work on messages of this size.

    Each has its share of the cores, and all have one bus.
    """
    cluster = question.cluster
    servers = math.ceil(process_count(term, question) / server_hosts(term, question))
    if not computes_on_cores(question):
        return _bus(cluster)
    device = server_device(term, question)
    share = device.memory_efficiency.at(max(1.0, num_bytes, _gone_through(term, question, device)))
    return share * min(
        servers * device.memory_bytes_per_s, max(device.memory_bytes_per_s, _bus(cluster))
    )


def _gone_through(term: Any, question: SyncQuestion, device: Device) -> float:
    """A device's share of the bytes between two passes over the same ones, which caches must hold.

    A server goes through the pushes of all workers, the weights, their sum and the optimizer's
    state, and through the inboxes of workers that share no weights with it. Rates by bytes were
    measured while as many such devices as the host has went through so many bytes each.
    """
    node = question.cluster.node
    if question.workers > node.devices or node.cores is None or device.threads is None:
        return 0.0
    vectors = question.workers * (1 if term.lockstep else 2) + 2
    held = vectors * question.parameter_bytes + question.state_bytes
    return held * device.threads / node.cores


def server_device(term: Any, question: SyncQuestion) -> Device:
    """The cores of one server: as many as the runtime gives it for its slice of the weights.

    How long a small kernel takes depends on how many processes compute at the same time: servers
    alone, where workers wait for them.
    """
    cluster = question.cluster
    node = cluster.node
    if term.placement != "servers" or node.cores is None:
        return cluster.device
    servers = int(term.servers)
    slice_bytes = question.each * question.parameter_bytes / servers
    threads = server_threads(
        slice_bytes, most_server_threads(node.cores, process_count(term, question))
    )
    device = node.device_among(max(1, node.cores // threads), cluster.device)
    busy = process_count(term, question) + (0 if term.lockstep else question.workers)
    beside = node.device_among(busy, cluster.device)
    return replace(device, update_launch_s=min(device.update_launch_s, beside.update_launch_s))


def memory_s(term: Any, question: SyncQuestion, message_bytes: float) -> float:
    """What one worker's push and pull take of the memory of the busiest servers' host."""
    hosts = server_hosts(term, question)
    passes = _push_passes(term) + 2
    return passes * message_bytes / (hosts * host_rate(term, question, message_bytes))


def has_measured_pushes(term: Any, question: SyncQuestion) -> bool:
    """Whether it is known how long servers of this host take for asynchronous pushes by bytes."""
    is_measured = question.cluster.device.served_bytes_per_s is not None
    is_one_host = question.workers <= question.cluster.node.devices
    is_plain = term.placement == "servers" and term.compress is None and term.replicas == 1
    return is_measured and is_one_host and is_plain and computes_on_cores(question)


def measured_push_s(term: Any, question: SyncQuestion) -> float:
    """A push and pull of one worker: several servers work at the same time, on one bus."""
    device = question.cluster.device
    assert device.served_bytes_per_s is not None
    servers = int(term.servers)
    share = question.parameter_bytes / servers
    rate = device.served_bytes_per_s * device.served_efficiency.at(max(1.0, share))
    one = replace(term, servers=1)
    beside = servers * host_rate(one, question, share) / host_rate(term, question, share)
    return max(1.0, beside) * share / rate


def _shared_memory(term: Any, question: SyncQuestion, message_bytes: float, passes: int) -> Way:
    cluster = question.cluster
    rate = host_rate(term, question, message_bytes)
    service_s = passes * message_bytes / rate
    alpha_s = cluster.node.fabric.alpha_s if cluster.node.fabric is not None else 0.0
    device_s = 0.0
    if not computes_on_cores(question) and cluster.node.pcie is not None:
        device_s = message_bytes * cluster.node.devices_per_pcie / cluster.node.pcie.rate
    all_s = max(question.workers * service_s, device_s)
    bound = f"memory of the host ({show_rate(rate)})"
    return Way(alpha_s + all_s, alpha_s + max(service_s, device_s), service_s, bound)


def _network(term: Any, question: SyncQuestion, message_bytes: float, passes: int) -> Way:
    cluster = question.cluster
    nic = cluster.node.nic
    if nic is None:
        return _shared_memory(term, question, message_bytes, passes)
    node_rate = cluster.node.nics * nic.rate
    traffic = step_traffic(term, question, message_bytes)
    workers = min(question.workers, cluster.node.devices)
    # one server a host, or those of all its workers
    into_node = traffic.into_server * (workers if term.placement == "workers" else 1)
    into_s = into_node / node_rate
    narrow = [
        (traffic.of_worker * workers / node_rate, f"{nic.name} of a worker's node"),
        (into_s, f"{nic.name} of the servers ({show_rate(node_rate)}), incast"),
        (_uplink_s(term, question, message_bytes), f"spine uplink 1:{cluster.oversubscription:g}"),
        (
            passes * into_node / host_rate(term, question, message_bytes),
            "memory of the servers' host",
        ),
    ]
    seconds, bound = max(narrow)
    alone_s = nic.alpha_s + traffic.of_worker / node_rate
    service_s = seconds / question.workers
    return Way(nic.alpha_s + seconds, max(alone_s, service_s), service_s, bound)


def _uplink_s(term: Any, question: SyncQuestion, message_bytes: float) -> float:
    """What comes into the servers' rack from others, over its uplinks."""
    cluster = question.cluster
    if cluster.racks == 1 or cluster.node.nic is None:
        return 0.0
    nodes = cluster.nodes_per_rack or cluster.nodes
    uplinks = nodes * cluster.node.nics * cluster.node.nic.rate / cluster.oversubscription
    racks = math.ceil(question.workers / (nodes * cluster.node.devices))
    if racks == 1:
        return 0.0
    into_rack = question.workers * message_bytes * (1 - 1 / racks)
    if term.placement == "workers":
        into_rack /= racks
    return into_rack / uplinks
