"""ps: servers hold the weights; workers push gradients and pull weights.

    sync          all wait for the slowest worker, and for the servers that take in all pushes
    quorum        a step needs the first k pushes
    staleness     workers are at most s steps apart
    async         every worker goes at its own pace, until the servers are busy all the time

Pushes go out while backward runs, in buckets of 4 MiB; a compressed slice when it is complete.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from shoal.plan.prediction import DeviceMemory, Part
from shoal.plan.step.stragglers import own_pace, queue_cycle_s, quorum_pace, staleness_pace
from shoal.plan.sync_price.base import (
    Agreeing,
    SyncPrice,
    SyncQuestion,
    bucketed_gradients,
    buckets_of,
    computes_on_cores,
    hidden_s,
    idle_share,
    memory_pass_s,
    plain_memory,
    some,
    synchronous_spread,
    update_part,
    update_s,
    waiting_part,
)
from shoal.plan.sync_price.compressed import factor_rank, is_factored, packed_bytes
from shoal.plan.sync_price.ps_links import (
    Way,
    chain_s,
    has_measured_pushes,
    host_rate,
    measured_push_s,
    process_count,
    pull,
    push,
    server_count,
    server_device,
    server_hosts,
    step_traffic,
)
from shoal.schedules.buffer_layout import PUSH_BUCKET_BYTES

_RESIDUAL_BYTES = 4
_INDEX_BYTES = 8


def shares_weights(term: Any, question: SyncQuestion) -> bool:
    """Whether workers of the host use the weights where the servers keep them."""
    takes_copies = term.replicas > 1 or (question.is_stage and term.compress is not None)
    return bool(term.update == "server" and term.lockstep and not takes_copies)


def ps_memory(term: Any, question: SyncQuestion) -> DeviceMemory:
    """Gradients are pushed from the buffer, or packed from another; weights come into an inbox.

    A server in a worker is in that worker's `buffers`; others are in `servers`.
    """
    plain = plain_memory(question)
    out = 0.0 if term.compress is None else question.buffer_bytes
    inbox = 0.0 if shares_weights(term, question) else question.buffer_bytes
    is_inside = term.placement != "servers"
    is_one_host = question.workers <= question.cluster.node.devices
    server = server_bytes(
        term, question, (is_inside or is_one_host) and shares_weights(term, question)
    )
    return replace(
        plain,
        gradients=bucketed_gradients(question, PUSH_BUCKET_BYTES),
        optimizer=0.0 if term.update == "server" else plain.optimizer,
        buffers=out + inbox + _residuals(term, question) + (server if is_inside else 0.0),
        servers=0.0 if is_inside else server * question.each,
    )


def server_bytes(term: Any, question: SyncQuestion, has_workers_weights: bool) -> float:
    """The fullest server, for one worker of a replica: weights, their sum, state, and pushes."""
    servers = question.replicas if term.placement == "workers" else term.servers
    elements = question.sizes.servers(servers)
    buffers = 1 if has_workers_weights else 2
    if term.compress is not None or term.replicas > 1:
        buffers += question.replicas  # a push of each
    state = elements * question.state_width if term.update == "server" else 0.0
    held = buffers * elements * question.precision.gradient_bytes + state
    return held + _basis(term, question) / servers


def _residuals(term: Any, question: SyncQuestion) -> float:
    """What compression has not sent, a copy of it where late pushes are dropped, and bases."""
    if term.compress is None:
        return 0.0
    sizes = question.sizes
    drops = term.quorum is not None and term.late == "drop"
    gaps = sizes.size - sizes.offset - sizes.trained
    residual = sizes.size * _RESIDUAL_BYTES * (2 if drops else 1)
    return residual + 2 * _INDEX_BYTES * gaps + _basis(term, question)


def _basis(term: Any, question: SyncQuestion) -> float:
    if term.compress is None or not is_factored(term.compress):
        return 0.0
    return math.ceil(4 * question.sizes.factors(factor_rank(term.compress)).right)


def ps(term: Any, question: SyncQuestion) -> SyncPrice:
    up = push(term, question, push_bytes(term, question))
    down = pull(term, question, pulled_bytes(term, question))
    parts, updates = _relaxed(term, question, up, down)
    if term.lockstep:
        parts, updates = _lockstep(term, question, up, down), 1.0
    traffic = step_traffic(term, question, push_bytes(term, question))
    return SyncPrice(
        (*parts, *_packing(term, question)),
        ps_memory(term, question),
        steps_per_batch=updates,
        convergence=_convergence(term, question),
        sent_bytes=push_bytes(term, question),
        server_bytes=traffic.into_server,
        agreeing=Agreeing(
            "servers",
            buckets_of(question, PUSH_BUCKET_BYTES),
            is_async=term.mode == "async",
            quorum=None if term.quorum is None else quorum_count(term, question.replicas),
            staleness=term.staleness,
        ),
        spread_s=synchronous_spread(question) if term.lockstep else (0.0, 0.0),
    )


def push_bytes(term: Any, question: SyncQuestion) -> float:
    """What a worker pushes in a step."""
    sizes = question.sizes
    if term.compress is None:
        return question.buffer_bytes
    if is_factored(term.compress):
        return 4 * sum(sizes.factors(factor_rank(term.compress)))
    servers = server_count(term, question)
    slice_elements = math.ceil((sizes.size - sizes.offset) / servers)
    pushed: float = servers * packed_bytes(term.compress, slice_elements)
    return pushed


def pulled_bytes(term: Any, question: SyncQuestion) -> float:
    """Weights, or sums; nothing where workers of the host use the servers' own memory."""
    is_one_host = question.workers <= question.cluster.node.devices
    if is_one_host and shares_weights(term, question):
        return 0.0
    if term.update == "worker":
        return question.buffer_bytes
    return question.parameter_bytes


def _exposed_push(term: Any, question: SyncQuestion, up: Way) -> float:
    """Buckets go out during backward; one server's compressed slice only when it has ended."""
    hidden = hidden_s(question)
    if term.compress is not None:
        hidden *= 1 - 1 / server_count(term, question)
    bucket_s = up.seconds * min(1.0, PUSH_BUCKET_BYTES / max(1.0, question.buffer_bytes))
    return min(up.seconds, max(up.seconds - hidden, bucket_s))


def server_update_s(term: Any, question: SyncQuestion) -> float:
    """Servers update at the same time, each its slice; on CPUs as fast as a worker would."""
    if computes_on_cores(question):
        share = question.each / server_count(term, question)
        slices = share * question.parameters
        tensors = share * question.sizes.tensors
        return update_s(server_device(term, question), question.precision, slices, tensors)
    moved = question.gradient_bytes + 2 * question.state_bytes + 2 * question.parameter_bytes
    hosts = server_hosts(term, question)
    return question.each * int(term.replicas) * moved / (hosts * host_rate(term, question, moved))


def momentum_update_s(term: Any, question: SyncQuestion) -> float:
    """The part of an update that measured pushes contain."""
    precision = replace(question.precision, master_bytes=0, state_bytes=4)
    slices = question.each * question.parameters / server_count(term, question)
    return update_s(server_device(term, question), precision, slices)


def _lockstep(term: Any, question: SyncQuestion, up: Way, down: Way) -> tuple[Part, ...]:
    update = update_part(question)
    if term.update == "server":
        update = Part("update", server_update_s(term, question), "memory of the servers")
    pushes = Part("push", _exposed_push(term, question, up), up.bound)
    chain = Part("chain", chain_s(term, question, push_bytes(term, question)), "hops of the chain")
    pulls = Part("pull", down.seconds, down.bound)
    requests = Part("requests", _answers_s(question)[0], "latency of the servers")
    return some(pushes, chain, pulls, requests, waiting_part(question), update)


def _answers_s(question: SyncQuestion) -> tuple[float, float]:
    """What answers take whatever their bytes: of a step that waits, and of a server's time."""
    if question.workers > question.cluster.node.devices:
        return 0.0, 0.0
    device = question.cluster.device
    return device.served_step_s, device.request_s


def _relaxed(
    term: Any, question: SyncQuestion, up: Way, down: Way
) -> tuple[tuple[Part, ...], float]:
    """A worker's own way of a step, how long it waits for others, and for busy servers."""
    if term.lockstep:
        return (), 1.0
    replicas = question.replicas
    pace, updates = _pace(term, question)
    if updates > 1 and has_measured_pushes(term, question):
        return _measured(term, question, pace), updates
    compute_s = question.compute_s
    update_s = server_update_s(term, question)
    every_push = 1 if updates > 1 else 1 / replicas  # an update for each push, or for each step
    hidden = min(hidden_s(question), up.alone_s)
    answer_s = _answers_s(question)[1]
    service_s = question.each * (up.service_s + down.service_s + answer_s) + update_s * every_push
    taken_s = _taken_cores_s(term, question, service_s)
    away_s = pace * compute_s - hidden + taken_s
    along_s = chain_s(term, question, push_bytes(term, question))
    request_s = up.alone_s + along_s + down.alone_s + answer_s + update_s * every_push
    cycle_s = _cycle_s(replicas, away_s, request_s, service_s)
    parts = some(
        Part("cores", taken_s, "cores shared with servers"),
        Part("push", up.alone_s - hidden, up.bound),
        Part("chain", along_s, "hops of the chain"),
        Part("pull", down.alone_s, down.bound),
        Part("requests", answer_s, "latency of the servers"),
        Part("stragglers", (pace - 1) * compute_s, "noise of workers"),
        Part("update", update_s * every_push, "memory of the servers"),
        Part("servers", cycle_s - away_s - request_s, "queue in front of the servers"),
    )
    return parts, updates


def _measured(term: Any, question: SyncQuestion, pace: float) -> tuple[Part, ...]:
    """From the time of asynchronous pushes on this host, with an update for each of them."""
    compute_s = question.compute_s
    moved_s = measured_push_s(term, question)
    answer_s = _answers_s(question)[1]
    update_s = server_update_s(term, question)
    more_s = max(0.0, update_s - momentum_update_s(term, question))
    service_s = question.each * (moved_s + answer_s) + more_s
    taken_s = _taken_cores_s(term, question, service_s)
    away_s = pace * compute_s + taken_s
    cycle_s = _cycle_s(question.replicas, away_s, service_s, service_s)
    return some(
        Part("cores", taken_s, "cores shared with servers"),
        Part("push and pull", question.each * moved_s, "memory of the host"),
        Part("requests", question.each * answer_s, "latency of the servers"),
        Part("stragglers", (pace - 1) * compute_s, "noise of workers"),
        Part("update", more_s, "memory of the servers"),
        Part("servers", cycle_s - away_s - service_s, "queue in front of the servers"),
    )


def _cycle_s(workers: int, away_s: float, request_s: float, service_s: float) -> float:
    """From one request of a worker to its next.

    A request takes `request_s` where no other is on its way, which is longer than what it takes
    of all servers together: a worker's own NIC is narrower than theirs. So many requests, and not
    just one, are served side by side.
    """
    beside = max(1.0, request_s / service_s) if service_s > 0 else float(workers)
    turns = max(1.0, workers / beside)
    few = math.floor(turns)
    least_s = queue_cycle_s(few, away_s, request_s)
    more_s = queue_cycle_s(few + 1, away_s, request_s)
    between_s = least_s + (turns - few) * (more_s - least_s)
    return max(between_s, workers * service_s)


def _pace(term: Any, question: SyncQuestion) -> tuple[float, float]:
    """Seconds of a step over its compute, and updates while a global batch is computed."""
    noise = question.cluster.noise
    replicas = question.replicas
    if term.quorum is not None:
        needed = quorum_count(term, replicas)
        return quorum_pace(noise, replicas, needed, question.each), 1.0
    if term.staleness is not None:
        return staleness_pace(noise, replicas, term.staleness, question.each), float(replicas)
    return own_pace(noise, question.each), float(replicas)


def quorum_count(term: Any, replicas: int) -> int:
    """A fraction of the workers, or a number of them."""
    if term.quorum <= 1:
        share = float(term.quorum)
        return max(1, math.ceil(share * replicas - 1e-9))
    return int(term.quorum)


def _taken_cores_s(term: Any, question: SyncQuestion, service_s: float) -> float:
    """What servers take from workers of a CPU host in one cycle, where no core is left for them.

    Workers that all wait for an update lend their cores to it; those that do not wait compute on.
    """
    if not computes_on_cores(question) or term.placement != "servers":
        return 0.0
    node = question.cluster.node
    cores = node.cores or node.devices
    idle = idle_share(question) * cores
    without = max(0.0, 1 - idle / process_count(term, question))
    return without * question.replicas * service_s / cores


def _packing(term: Any, question: SyncQuestion) -> tuple[Part, ...]:
    if term.compress is None:
        return ()
    return (Part("compress", memory_pass_s(question, 4 * question.buffer_bytes), "memory"),)


def _convergence(term: Any, question: SyncQuestion) -> str:
    replicas = question.replicas
    if term.quorum is not None:
        needed = quorum_count(term, replicas)
        lost = "added to the next step" if term.late == "fold" else "dropped"
        return f"{needed} of {replicas} gradients make a step; late ones are {lost}"
    if term.staleness:
        return f"a worker's weights are up to {term.staleness} of its steps old"
    if term.mode == "async":
        return f"a gradient is about {replicas - 1} updates old when it is used"
    return ""
