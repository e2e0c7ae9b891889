"""What pushes and pulls take between workers and parameter servers, and who waits for whom.

    shared memory   gradients lie where servers see them; each server adds up its slice with a core
                    of its own, and all of them share the host's memory bus
    network         every worker sends through its node's NICs; the servers' NICs receive what all
                    workers send (incast), and so do the uplinks of the servers' rack

The slowest of these sets the pace. `workers` as placement divides the model over all workers, and
so does away with the incast.

    sync          all wait for the slowest worker, and for the servers that take in all pushes
    quorum        a step needs the first k pushes
    staleness     workers are at most s steps apart
    async         every worker goes at its own pace, until the servers are busy all the time

Pushes go out while backward runs, in buckets; a compressed slice when it is complete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from shoal.cluster.hardware import Device
from shoal.cluster.units import show_rate
from shoal.plan.prediction import Part
from shoal.plan.step.stragglers import own_pace, queue_cycle_s, quorum_pace, staleness_pace
from shoal.plan.sync_price import SyncQuestion, update_s
from shoal.runtime.memory_limit import most_server_threads, server_threads
from shoal.schedules.buffer_layout import PUSH_BUCKET_BYTES
from shoal.schedules.steps.step import StepSchedule, Where
from shoal.strategy.base import SyncTerm

ROW_PASSES = 6  # of a row and its state, which are read and written, and of its gradient
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

    @cached_property
    def step(self) -> StepSchedule:
        return self.question.busiest_step(self.term)

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

    @cached_property
    def push_bytes(self) -> float:
        """What a worker pushes in a step."""
        return self._bytes_of("push")

    def _bytes_of(self, kind: str) -> float:
        return sum(one.num_bytes for one in self.step.exchanges if one.kind == kind)

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
        return self._way(self._bytes_of("pull"), 2)

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
            device_s = message_bytes / node.pcie_bytes_per_s
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


def served_parts(term: SyncTerm, question: SyncQuestion) -> tuple[Part, ...]:
    serving = Serving(term, question)
    step = serving.step
    rows = serving.rows()
    if term.lockstep or step.waits.replicas:
        parts = _in_step(serving)
    elif question.replicas > 1 and serving.has_measured_pushes:
        parts = _measured(serving)
    else:
        parts = _relaxed(serving)
    if rows is not None:
        rows_s = (
            rows.seconds if term.lockstep else max(rows.alone_s, rows.service_s * question.replicas)
        )
        parts += (Part("rows", rows_s, rows.bound),)
    if packing := sum(exchange.packing for exchange in step.exchanges):
        parts += (Part("compress", question.device.pass_s(packing), "memory"),)
    return parts


def _in_step(serving: Serving) -> tuple[Part, ...]:
    """All push at the same time, and pull at the same time, whether or not all are waited for."""
    question = serving.question
    up, down = serving.push(), serving.pull()
    # buckets go out during backward; one server's compressed slice only when it has ended
    hidden_s = question.hidden_s
    if any(exchange.packing for exchange in serving.step.exchanges):
        hidden_s *= 1 - 1 / serving.servers
    bucket_s = up.seconds * min(1.0, PUSH_BUCKET_BYTES / max(1.0, question.buffer_bytes))
    push_s = min(up.seconds, max(up.seconds - hidden_s, bucket_s))
    if question.latest_s and serving.term.lockstep:  # what the others push is there already
        last = question.late_s.count(question.latest_s) / question.replicas
        push_s = max(last * push_s, push_s - question.latest_s)
    waiting = question.waiting_part()
    if not serving.term.lockstep:
        waiting = Part("stragglers", _waits_s(serving), "noise of workers")
    update = question.update_part()
    if serving.step.updates is Where.SERVER:
        update = Part("update", serving.update_s(), "memory of the servers")
    return (
        Part("push", push_s, up.bound),
        Part("chain", serving.chain_s(), "hops of the chain"),
        Part("pull", down.seconds, down.bound),
        Part("requests", _answers_s(question)[0], "latency of the servers"),
        waiting,
        update,
    )


def _answers_s(question: SyncQuestion) -> tuple[float, float]:
    """What answers take whatever their bytes: of a step that waits, and of a server's time."""
    times = (question.device.served_step_s, question.device.request_s)
    return times if question.on_one_host else (0.0, 0.0)


def _relaxed(serving: Serving) -> tuple[Part, ...]:
    """Each push and pull by itself; an update follows each push."""
    question = serving.question
    up, down = serving.push(), serving.pull()
    update_s = serving.update_s()
    hidden_s = min(question.hidden_s, up.alone_s)
    answer_s = _answers_s(question)[1]
    service_s = question.each * (up.service_s + down.service_s + answer_s) + update_s
    requests = (
        Part("push", up.alone_s - hidden_s, up.bound),
        Part("chain", serving.chain_s(), "hops of the chain"),
        Part("pull", down.alone_s, down.bound),
        Part("requests", answer_s, "latency of the servers"),
        Part("update", update_s, "memory of the servers"),
    )
    return _in_turn(serving, requests, service_s, hidden_s)


def _measured(serving: Serving) -> tuple[Part, ...]:
    """From the time of asynchronous pushes on this host, with an update for each of them."""
    each = serving.question.each
    more_s = max(0.0, serving.update_s() - serving.momentum_update_s())
    requests = (
        Part("push and pull", each * serving.measured_push_s(), "memory of the host"),
        Part("requests", each * _answers_s(serving.question)[1], "latency of the servers"),
        Part("update", more_s, "memory of the servers"),
    )
    return _in_turn(serving, requests, sum(part.seconds for part in requests))


def _in_turn(
    serving: Serving, requests: tuple[Part, ...], service_s: float, hidden_s: float = 0.0
) -> tuple[Part, ...]:
    """A worker's own way of a step, how long it waits for others, and for busy servers."""
    question = serving.question
    waits_s = _waits_s(serving)
    taken_s = serving.taken_cores_s(service_s)
    away_s = question.compute_s + waits_s + taken_s - hidden_s
    request_s = sum(part.seconds for part in requests) + hidden_s
    if not serving.step.waits.steps:
        more_s = question.mean_step_s(away_s + request_s) - away_s - request_s
        away_s, waits_s = away_s + more_s, waits_s + more_s
    # a link carries pushes and pulls at the same time: two queues
    queues = 1 if question.on_one_host else 2
    cycle_s = _cycle_s(question.replicas, away_s, request_s / queues, service_s / queues, queues)
    return (
        Part("cores", taken_s, "cores shared with servers"),
        *requests,
        Part("stragglers", waits_s, "noise of workers"),
        Part("servers", cycle_s - away_s - request_s, "queue in front of the servers"),
    )


def _cycle_s(workers: int, away_s: float, request_s: float, service_s: float, queues: int) -> float:
    """From one request of a worker to its next; times are of one of equal queues.

    A request takes `request_s` where no other is on its way, which is longer than what it takes
    of all servers together: a worker's own NIC is narrower than theirs. So many requests, and not
    just one, are served side by side.
    """
    beside = max(1.0, request_s / service_s) if service_s > 0 else float(workers)
    turns = max(1.0, workers / beside)
    few = math.floor(turns)
    least_s = queue_cycle_s(few, away_s, request_s, queues)
    more_s = queue_cycle_s(few + 1, away_s, request_s, queues)
    between_s = least_s + (turns - few) * (more_s - least_s)
    return max(between_s, workers * service_s)


def _waits_s(serving: Serving) -> float:
    """How much a worker's computing, and its waiting for others, take longer than they would."""
    waits, question = serving.step.waits, serving.question
    noise, replicas, each = question.cluster.noise, question.replicas, question.each
    if waits.replicas:
        needed, quick = int(waits.replicas), replicas - len(question.late_s)
        late_s = sorted(question.late_s)[needed - quick - 1] if needed > quick else 0.0
        pace = quorum_pace(noise, max(quick, needed), needed, each)
        return (pace - 1) * question.compute_s + late_s
    if waits.steps:  # in the end all have the pace of the slowest
        pace = staleness_pace(noise, replicas, waits.steps, each)
        return max((pace - 1) * question.compute_s, question.latest_s)
    return (own_pace(noise, each) - 1) * question.compute_s
