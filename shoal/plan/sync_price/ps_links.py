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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from shoal.cluster.hardware import Device
from shoal.cluster.units import show_rate
from shoal.plan.sync_price import ROW_PASSES, SyncQuestion, update_s
from shoal.runtime.memory_limit import most_server_threads, server_threads
from shoal.schedules.steps.servers import push_bytes, shares_weights

_PASSES_TO_ADD = 3  # a push is read, and so is the sum, which is written


class Way(NamedTuple):
    """One direction of one step: all pushes, or all pulls."""

    seconds: float  # until the last of all workers is through
    alone_s: float  # of one worker while no other sends
    service_s: float  # of the busiest server's time that one worker takes
    bound: str


@dataclass(frozen=True)
class Serving:
    """The servers of a term, and the workers of a question that push to them."""

    term: Any
    question: SyncQuestion

    @property
    def servers(self) -> int:
        is_on_workers = self.term.placement == "workers"
        return self.question.workers if is_on_workers else int(self.term.servers)

    @property
    def processes(self) -> int:
        """Servers and their copies."""
        return self.servers * int(self.term.replicas)

    @property
    def hosts(self) -> int:
        """Hosts that servers are on: that of the workers, or one for each process, or all."""
        if self.question.on_one_host or self.term.placement == "rank0":
            return 1
        if self.term.placement == "servers":
            return self.processes
        return -(-self.question.workers // self.question.node.devices)

    @property
    def shares_weights(self) -> bool:
        """Whether workers of the host use the weights where the servers keep them."""
        return shares_weights(self.term, self.question.model)

    @cached_property
    def push_bytes(self) -> float:
        """What a worker pushes in a step."""
        return push_bytes(self.term, self.question.model, self.servers)

    @property
    def pulled_bytes(self) -> float:
        """Weights, or sums; nothing where workers of the host use the servers' own memory."""
        question = self.question
        if question.on_one_host and self.shares_weights:
            return 0.0
        return question.buffer_bytes if self.term.update == "worker" else question.parameter_bytes

    def _traffic(self, message_bytes: float) -> tuple[float, float]:
        """Bytes that leave a worker for servers elsewhere, and come into the busiest server."""
        question = self.question
        if self.term.placement == "rank0":
            inside = message_bytes * question.each  # of the first replica's workers
            total = message_bytes * question.workers
            return message_bytes * (1 - 1 / question.replicas), total - inside
        if self.term.placement == "workers":
            others = message_bytes * (question.replicas - 1) / question.replicas
            return others, others
        return message_bytes, message_bytes * question.workers / self.term.servers

    def push(self) -> Way:
        """All copies of a server work on a push; on one host they share its memory."""
        copies = 1 if self.question.on_one_host else int(self.term.replicas)
        return self._way(self.push_bytes, self._push_passes // copies)

    def pull(self) -> Way:
        return self._way(self.pulled_bytes, 2)

    def rows(self) -> Way | None:
        """Pulls of rows before a forward, and pushes of their gradients after the last backward."""
        if not self.question.row_tables:
            return None
        pulled, pushed = self.question.row_traffic
        there, back = self._way(pulled, 2), self._way(pushed, ROW_PASSES * self.term.replicas)
        sums = [a + b for a, b in zip(there[:3], back[:3], strict=True)]
        return Way(sums[0], sums[1], sums[2], max(there, back).bound)

    def chain_s(self) -> float:
        """What a push takes along the chain, from the first copy to the last, and back."""
        hops = int(self.term.replicas) - 1
        if not hops or self.term.consistency == "eventual":
            return 0.0
        node = self.question.node
        if self.question.on_one_host or node.nic is None:
            return 2 * hops * (0.0 if node.fabric is None else node.fabric.alpha_s)
        share = self.push_bytes / self.servers
        return hops * (2 * node.nic.alpha_s + share / (node.nics * node.nic.rate))

    def memory_s(self) -> float:
        """What one worker's push and pull take of the memory of the busiest servers' host."""
        moved = (self._push_passes + 2) * self.push_bytes
        return moved / (self.hosts * self._host_rate(self.push_bytes))

    @property
    def has_measured_pushes(self) -> bool:
        """Whether it is known how long servers of this host take for asynchronous pushes."""
        term, question = self.term, self.question
        is_measured = question.device.served_bytes_per_s is not None and question.on_cores
        is_plain = term.placement == "servers" and term.compress is None and term.replicas == 1
        return is_measured and question.on_one_host and is_plain

    def measured_push_s(self) -> float:
        """A push and pull of one worker: several servers work at the same time, on one bus."""
        device = self.question.device
        assert device.served_bytes_per_s is not None
        servers = int(self.term.servers)
        share = self.question.parameter_bytes / servers
        rate = device.served_bytes_per_s * device.served_efficiency.at(max(1.0, share))
        one = replace(self, term=replace(self.term, servers=1))
        beside = servers * one._host_rate(share) / self._host_rate(share)
        return max(1.0, beside) * share / rate

    def update_s(self) -> float:
        """Servers update at the same time, each its slice; on CPUs as fast as a worker would."""
        question = self.question
        if question.on_cores:
            share = question.each / self.servers
            numbers, tensors = share * question.parameters, share * question.sizes.tensors
            return update_s(self._device(), question.precision, numbers, tensors)
        moved = question.gradient_bytes + 2 * question.state_bytes + 2 * question.parameter_bytes
        copies = question.each * int(self.term.replicas)
        return copies * moved / (self.hosts * self._host_rate(moved))

    def momentum_update_s(self) -> float:
        """The part of an update that measured pushes contain."""
        question = self.question
        precision = replace(question.precision, master_bytes=0, state_bytes=4)
        return update_s(
            self._device(), precision, question.each * question.parameters / self.servers
        )

    def taken_cores_s(self, service_s: float) -> float:
        """What servers take from workers of a CPU host in one cycle, where no core is left."""
        question = self.question
        if not question.on_cores or self.term.placement != "servers":
            return 0.0
        cores = question.node.cores or question.node.devices
        idle = question.idle_share * cores
        without = max(0.0, 1 - idle / self.processes)
        return without * question.replicas * service_s / cores

    @property
    def _push_passes(self) -> int:
        """Over the bytes of a push, by all copies; each keeps it until it has arrived."""
        copies = 2 if self.term.replicas > 1 else 0
        return int(self.term.replicas) * (_PASSES_TO_ADD + copies)

    def _host_rate(self, num_bytes: float) -> float:
        """Bytes a second at which the servers of one host work on messages of this size."""
        question = self.question
        bus = question.node.memory_bytes_per_s
        if bus is None:
            bus = question.device.memory_bytes_per_s * question.node.devices
        if not question.on_cores:
            return bus
        device = self._device()
        share = device.memory_efficiency.at(max(1.0, num_bytes, self._gone_through(device)))
        servers = math.ceil(self.processes / self.hosts)
        rate = device.memory_bytes_per_s
        return share * min(servers * rate, max(rate, bus))

    def _gone_through(self, device: Device) -> float:
        """A device's share of the bytes between two passes over the same, which caches must hold.

        A server goes through the pushes of all workers, the weights, their sum and the optimizer's
        state, and through the inboxes of workers that share no weights with it. Rates by bytes were
        measured while as many such devices as the host has went through so many bytes each.
        """
        question = self.question
        cores = question.node.cores
        if not question.on_one_host or cores is None or device.threads is None:
            return 0.0
        vectors = question.workers * (1 if self.term.lockstep else 2) + 2
        held = vectors * question.parameter_bytes + question.state_bytes
        return held * device.threads / cores

    def _device(self) -> Device:
        """The cores of one server: as many as the runtime gives it for its slice of the weights."""
        question = self.question
        node, device = question.node, question.device
        if self.term.placement != "servers" or node.cores is None:
            return device
        slice_bytes = question.each * question.parameter_bytes / int(self.term.servers)
        threads = server_threads(slice_bytes, most_server_threads(node.cores, self.processes))
        busy = self.processes + (0 if self.term.lockstep else question.workers)
        beside = node.device_among(busy, device)
        found = node.device_among(max(1, node.cores // threads), device)
        return replace(found, update_launch_s=min(found.update_launch_s, beside.update_launch_s))

    def _way(self, message_bytes: float, passes: int) -> Way:
        """`passes` over its bytes is what a server does with a message."""
        nic = self.question.node.nic
        if self.question.on_one_host or nic is None:
            return self._shared_memory(message_bytes, passes)
        question, cluster = self.question, self.question.cluster
        node_rate = question.node.nics * nic.rate
        of_worker, into_node = self._traffic(message_bytes)
        workers = min(question.workers, question.node.devices)
        if self.term.placement == "workers":
            into_node *= workers  # the servers of all workers of a host; else one server a host
        uplink = f"spine uplink 1:{cluster.oversubscription:g}"
        worked_s = passes * into_node / self._host_rate(message_bytes)
        narrow = [
            (of_worker * workers / node_rate, f"{nic.name} of a worker's node"),
            (into_node / node_rate, f"{nic.name} of the servers ({show_rate(node_rate)}), incast"),
            (self._uplink_s(message_bytes), uplink),
            (worked_s, "memory of the servers' host"),
        ]
        seconds, bound = max(narrow)
        alone_s = nic.alpha_s + of_worker / node_rate
        service_s = seconds / question.workers
        return Way(nic.alpha_s + seconds, max(alone_s, service_s), service_s, bound)

    def _shared_memory(self, message_bytes: float, passes: int) -> Way:
        node = self.question.node
        rate = self._host_rate(message_bytes)
        service_s = passes * message_bytes / rate
        alpha_s = node.fabric.alpha_s if node.fabric is not None else 0.0
        device_s = 0.0
        if not self.question.on_cores and node.pcie is not None:
            device_s = message_bytes * node.devices_per_pcie / node.pcie.rate
        all_s = max(self.question.workers * service_s, device_s)
        bound = f"memory of the host ({show_rate(rate)})"
        return Way(alpha_s + all_s, alpha_s + max(service_s, device_s), service_s, bound)

    def _uplink_s(self, message_bytes: float) -> float:
        """What comes into the servers' rack from others, over its uplinks."""
        question, cluster = self.question, self.question.cluster
        if cluster.racks == 1:
            return 0.0
        nodes = cluster.nodes_per_rack or cluster.nodes
        racks = math.ceil(question.workers / (nodes * question.node.devices))
        into_rack = question.workers * message_bytes * (1 - 1 / racks)
        if self.term.placement == "workers":
            into_rack /= racks
        return into_rack / cluster.uplink_bytes_per_s
