"""What a strategy adds to a step: the sum over its exchanges, and who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.cluster.units import show_rate
from shoal.errors import BadInput
from shoal.plan.prediction import DeviceMemory, Part
from shoal.plan.step.stragglers import neighbours_pace, own_pace
from shoal.plan.sync_price import SyncQuestion
from shoal.plan.sync_price.exchanges import ExchangePrices
from shoal.plan.sync_price.mixing import convergence_of
from shoal.plan.sync_price.servers import ROW_PASSES, served_parts
from shoal.schedules.steps.step import NO_WAIT, Exchange, StepSchedule, When
from shoal.strategy.base import Batches, SyncTerm

_PASSES_TO_PULL = 2  # of rows that are copied


@dataclass(frozen=True)
class SyncPrice:
    """`parts` lengthen the step. Workers that do not wait have a rate of their own."""

    parts: tuple[Part, ...]
    convergence: str  # what it costs in progress
    memory: DeviceMemory  # without activations
    sent_bytes: float  # by a worker in a step, the mean over workers
    spread_s: tuple[float, float] = (0.0, 0.0)  # noise: how far steps lie below and above


def price_of(term: SyncTerm, question: SyncQuestion) -> SyncPrice:
    """What the sync term adds to the step of this question."""
    if term.needs_one_host and not question.on_one_host:
        raise BadInput(
            f"{term.name} goes through the memory of one host, and {question.workers} workers need "
            f"several nodes of {question.cluster.name}, which have {question.node.devices} "
            "devices each"
        )
    step = question.busiest_step(term)
    waits = step.waits
    if term.has_servers:
        parts = list(served_parts(term, question))
        is_even = term.lockstep
    else:
        parts = _parts(term, step, question)
        is_even = waits != NO_WAIT
    return SyncPrice(
        tuple(part for part in parts if part.seconds > 0 or part.name == "update"),
        _convergence(term, step, question.replicas),
        _with_rows(question.memory(term), term, question),
        question.sent_bytes(term),
        question.synchronous_spread() if is_even else (0.0, 0.0),
    )


def _parts(term: SyncTerm, step: StepSchedule, question: SyncQuestion) -> list[Part]:
    """One for each name; its first one says what bounds it."""
    by_name: dict[str, Part] = {}
    found = [*ExchangePrices(question, step.exchanges).parts(), *_passes(step, question)]
    for part in found:
        before = by_name.get(part.name, part._replace(seconds=0.0))
        by_name[part.name] = before._replace(seconds=before.seconds + part.seconds)
    parts = list(by_name.values())
    share = step.updated / max(1.0, question.sizes.trained)
    update = question.update_part(share)
    if step.host_copies:
        parts.append(_over_host_link(step, question, update.seconds))
    own_s = question.compute_s + update.seconds + sum(part.seconds for part in parts)
    waiting = _waiting(term, step, question, own_s)
    shared = [one for one in step.exchanges if one.kind == "share"]
    parts += [_shared(one, question, own_s + waiting.seconds) for one in shared]
    return [*parts, waiting, update]


def _passes(step: StepSchedule, question: SyncQuestion) -> list[Part]:
    """Over memory; and rows that are in the only worker."""
    passes = [
        Part(one.name, question.device.pass_s(one.num_bytes) / one.every, "memory")
        for one in step.passes
    ]
    if question.row_tables:
        pulled, pushed = question.row_traffic
        bus = question.node.memory_bytes_per_s or question.device.memory_bytes_per_s
        moved = _PASSES_TO_PULL * pulled + ROW_PASSES * pushed
        passes.append(Part("rows", moved / bus, "memory of the host"))
    return passes


def _over_host_link(step: StepSchedule, question: SyncQuestion, update_s: float) -> Part:
    """Copies that computing does not hide. Both directions run at once, beside what a GPU does."""
    if question.on_cores:
        moved = 2 * sum(one.num_bytes for one in step.host_copies)
        return Part("offload", question.device.pass_s(moved), "memory")
    pcie = question.node.pcie
    if pcie is None:
        raise BadInput(
            f"offload needs pcie, the link to the host: {question.cluster.name} has none"
        )
    rate = question.node.pcie_bytes_per_s
    hidden_s = {
        When.BEFORE_UNIT: question.compute_s,
        When.IN_BACKWARD: question.microbatches * question.backward_s,
        When.AFTER_BACKWARD: update_s,
    }
    seconds = 0.0
    for when, hides_s in hidden_s.items():
        ways = [
            sum(one.num_bytes for one in step.host_copies if (one.when, one.kind) == (when, kind))
            for kind in ("up", "down")
        ]
        seconds += max(0.0, max(ways) / rate - hides_s)
    return Part("offload", seconds, f"{pcie.name} ({show_rate(rate)})")


def _shared(exchange: Exchange, question: SyncQuestion, own_s: float) -> Part:
    """All finish a batch each in the step of one, until the host's memory carries no more."""
    bus = question.node.memory_bytes_per_s
    bus_s = 0.0 if bus is None else exchange.num_bytes / bus
    return Part("shared weights", max(0.0, question.replicas * bus_s - own_s), "memory of the host")


def _waiting(term: SyncTerm, step: StepSchedule, question: SyncQuestion, own_s: float) -> Part:
    """For the slowest of all, for neighbours, or for none."""
    waits = step.waits
    noise, each = question.cluster.noise, question.each
    if waits == NO_WAIT:
        late_s = (own_pace(noise, each) - 1) * question.compute_s
        late_s += question.mean_step_s(own_s + late_s) - own_s - late_s
    elif waits.neighbours:
        graph = step.exchanges[0].graph
        pace = neighbours_pace(noise, graph, question.replicas, each)
        late_s = (pace - 1) * question.compute_s
        if not term.lockstep:  # in the end all have the pace of the slowest
            late_s = max(late_s, question.latest_s)
    else:
        return question.waiting_part(max((one.every for one in step.exchanges), default=1))
    return Part("stragglers", late_s, "noise of workers")


def _convergence(term: Any, step: StepSchedule, replicas: int) -> str:
    waits = step.waits
    exchanges = step.exchanges
    if replicas == 1 or not exchanges:
        return ""
    if exchanges[0].graph:
        return convergence_of(exchanges[0].graph, replicas)
    if waits == NO_WAIT:
        return f"a gradient is about {replicas - 1} updates old when it is used"
    if waits.replicas is not None:
        lost = "added to the next step" if term.late == "fold" else "dropped"
        return f"{waits.replicas:g} of {replicas} gradients make a step; late ones are {lost}"
    if waits.steps:
        return f"a worker's weights are up to {waits.steps} of its steps old"
    if term.batches is Batches.WHOLE_DATASET:
        return "one update for the whole dataset"
    if not term.lockstep and term.meets_every > 1:
        return f"replicas agree after {term.meets_every} steps of their own"
    return ""


def _with_rows(memory: DeviceMemory, term: SyncTerm, question: SyncQuestion) -> DeviceMemory:
    """Rows of tables are in the only worker, or divided by servers, some of which workers hold."""
    rows = question.row_bytes
    if not term.has_servers:
        return memory._replace(parameters=memory.parameters + rows)
    if term.server_processes:
        rows /= term.server_processes // term.server_replicas
        return memory._replace(servers=memory.servers + rows)
    servers = 1 if term.needs_first_replica else question.replicas
    return memory._replace(buffers=memory.buffers + rows / servers / question.each)
