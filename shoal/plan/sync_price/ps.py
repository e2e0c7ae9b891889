"""ps: servers hold the weights; workers push gradients and pull weights.

    sync          all wait for the slowest worker, and for the servers that take in all pushes
    quorum        a step needs the first k pushes
    staleness     workers are at most s steps apart
    async         every worker goes at its own pace, until the servers are busy all the time

Pushes go out while backward runs, in buckets of 4 MiB; a compressed slice when it is complete.
"""

from __future__ import annotations

import math
from typing import Any

from shoal.plan.prediction import Part
from shoal.plan.step.stragglers import own_pace, queue_cycle_s, quorum_pace, staleness_pace
from shoal.plan.sync_price import SyncPrice, SyncQuestion, some
from shoal.plan.sync_price.ps_links import Serving, Way
from shoal.schedules.buffer_layout import PUSH_BUCKET_BYTES
from shoal.schedules.steps.servers import quorum_count


def ps(term: Any, question: SyncQuestion) -> SyncPrice:
    serving = Serving(term, question)
    up, down = serving.push(), serving.pull()
    rows = serving.rows()
    if term.lockstep or term.quorum is not None:
        parts = _in_step(serving, up, down)
    elif question.replicas > 1 and serving.has_measured_pushes:
        parts = _measured(serving)
    else:
        parts = _relaxed(serving, up, down)
    if rows is not None:
        rows_s = (
            rows.seconds if term.lockstep else max(rows.alone_s, rows.service_s * question.replicas)
        )
        parts += (Part("rows", rows_s, rows.bound),)
    if term.compress is not None:
        parts += (Part("compress", question.device.pass_s(4 * question.buffer_bytes), "memory"),)
    return SyncPrice(
        parts,
        convergence=_convergence(term, question),
        spread_s=question.synchronous_spread() if term.lockstep else (0.0, 0.0),
    )


def _in_step(serving: Serving, up: Way, down: Way) -> tuple[Part, ...]:
    """All push at the same time, and pull at the same time, whether or not all are waited for."""
    question = serving.question
    # buckets go out during backward; one server's compressed slice only when it has ended
    hidden_s = question.hidden_s
    if serving.term.compress is not None:
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
    if serving.term.update == "server":
        update = Part("update", serving.update_s(), "memory of the servers")
    return some(
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


def _relaxed(serving: Serving, up: Way, down: Way) -> tuple[Part, ...]:
    """Each push and pull by itself; an update follows each push."""
    question = serving.question
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
    if serving.term.staleness is None:
        more_s = question.mean_step_s(away_s + request_s) - away_s - request_s
        away_s, waits_s = away_s + more_s, waits_s + more_s
    # a link carries pushes and pulls at the same time: two queues
    queues = 1 if question.on_one_host else 2
    cycle_s = _cycle_s(question.replicas, away_s, request_s / queues, service_s / queues, queues)
    return some(
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
    term, question = serving.term, serving.question
    noise, replicas, each = question.cluster.noise, question.replicas, question.each
    if term.quorum is not None:
        needed, quick = quorum_count(term, replicas), replicas - len(question.late_s)
        late_s = sorted(question.late_s)[needed - quick - 1] if needed > quick else 0.0
        pace = quorum_pace(noise, max(quick, needed), needed, each)
        return (pace - 1) * question.compute_s + late_s
    if term.staleness is not None:  # in the end all have the pace of the slowest
        waits_s = (staleness_pace(noise, replicas, term.staleness, each) - 1) * question.compute_s
        return max(waits_s, question.latest_s)
    return (own_pace(noise, each) - 1) * question.compute_s


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
