"""How much of the time is useful where nodes fail: saves, what a failure undoes, Shoal's answers.

    recovery  train  save  train  save  train …  failure  recovery  train  save …
                                        └───────────────┘ lost

Failures come at random, at a constant rate, in recoveries too. Training goes on from the last save
that was complete. A save holds training up, and may be complete later, beside training.

restart     all go back to the last save, and wait where no spare node is left
elastic     the others go on: a step is done again, and nodes are missing until they are back
replicated  the same with a parameter server that has a copy
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

from shoal.cluster import Cluster
from shoal.errors import StrategyError
from shoal.strategy.base import SyncTerm
from shoal.strategy.strategy import Strategy

if TYPE_CHECKING:
    from shoal.plan.prediction import Prediction

    Way = tuple[SyncTerm, Prediction]


@dataclass(frozen=True)
class Shares:
    """Shares of time; they add up to 1."""

    useful: float
    saves: float = 0.0
    lost: float = 0.0  # work that is done again
    restarts: float = 0.0
    repair: float = 0.0  # nodes that are missing


@dataclass(frozen=True)
class Renewal:
    """Training between failures: what a save and a recovery take."""

    mtbf_s: float
    held_s: float = 0.0  # training waits for a save
    written_s: float = 0.0  # until it is complete, beside training
    recovery_s: float = 0.0

    def shares(self, interval_s: float, repair: float = 0.0) -> Shares:
        """Exact: of a run that lasts t, (t - recovery - written) // cycle intervals are kept."""
        cycle_s = max(interval_s, self.written_s) + self.held_s  # one save ends before the next
        restarts = -math.expm1(-self.recovery_s / self.mtbf_s)
        kept = 1 / cycle_s  # a second
        if not math.isinf(self.mtbf_s):
            first_s = self.recovery_s + self.written_s + cycle_s
            fails = -math.expm1(-cycle_s / self.mtbf_s)
            kept = math.exp(-first_s / self.mtbf_s) / fails / self.mtbf_s
        cycles = kept * cycle_s
        useful = kept * interval_s
        saves = cycles - useful
        lost = 1 - restarts - cycles
        there = 1 - repair
        return Shares(there * useful, there * saves, there * lost, there * restarts, repair)

    @property
    def best_interval_s(self) -> float:
        """The root of x = 1 - exp(-x - held), in units of the mean time between failures."""
        held = self.held_s / self.mtbf_s
        share = 1.0
        for _ in range(100):  # Newton's method, from above
            fails = -math.expm1(-share - held)
            share -= (share - fails) / fails
        return max(share * self.mtbf_s, self.written_s)

    @property
    def young_s(self) -> float:
        return math.sqrt(2 * self.held_s * self.mtbf_s)

    @property
    def daly_s(self) -> float:
        ratio = self.held_s / (2 * self.mtbf_s)
        if ratio >= 1:
            return self.mtbf_s
        return self.young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.held_s


def waiting_share(load: float, spares: int) -> float:
    """Of time that a run waits for a repair: Erlang's loss formula; `load` is repair over MTBF."""
    blocked = 1.0
    for broken in range(1, spares + 2):
        blocked = load * blocked / (broken + load * blocked)
    return blocked


def missing_nodes(load: float, nodes: int, spares: int) -> float:
    """The mean number that a run goes on without, where it does not wait; these do not fail."""
    total = 1.0  # over the chance of so many broken nodes
    missing = 0.0
    for broken in range(1, nodes + spares + 1):
        rate = max(1e-300, load * min(1, (nodes + spares + 1 - broken) / nodes)) / broken
        total = 1 + total / rate
        missing = max(0, broken - spares) + missing / rate
        if total > 1e18:
            break
    return missing / total


STORAGE_BYTES_PER_S = 10e9  # assumed where nothing is known
REPAIR_S = 4 * 3600.0
Saves = Literal["background", "wait", "sharded"]


@dataclass(frozen=True)
class Failures:
    """How often nodes fail, and what a failure takes."""

    mtbf_s: float  # between failures of any node of the run
    spares: int = 0
    repair_s: float = REPAIR_S
    detect_s: float = 30.0
    start_s: float = 120.0  # all workers again, before they load
    saves: Saves = "background"


@dataclass(frozen=True)
class Answer:
    """What is done about a failure, and what that leaves of the time."""

    name: str
    strategy: str
    step_s: float
    shares: Shares
    interval_s: float  # of work that is kept together

    @property
    def effective_s(self) -> float:
        """For the work of a step."""
        return self.step_s / max(self.shares.useful, 1e-12)


@dataclass(frozen=True)
class Goodput:
    """The answers that a strategy allows; restart is the first."""

    failures: Failures
    nodes: int
    checkpoint_bytes: float
    renewal: Renewal  # of restart
    answers: tuple[Answer, ...]

    @property
    def best(self) -> Answer:
        return min(self.answers, key=lambda one: one.effective_s)


def elastic_term(strategy: Strategy, replicas: int, devices: int) -> SyncTerm | None:
    """With workers that come back, where a node with so many devices can be lost."""
    try:
        term = strategy.sync_for(replicas).taking_back(replicas).as_elastic()
    except StrategyError:
        return None
    if strategy.splits or replicas <= devices or term.needs_first_replica:
        return None
    changed: dict[str, int] = {}
    if "copies" in {field.name for field in fields(term)}:  # of each shard, on another node
        changed["copies"] = min(devices, replicas - 1)
    if term.has_servers:
        changed["replicas"] = max(2, term.server_replicas)
    return replace(term, **changed)


def goodput_of(
    failures: Failures, cluster: Cluster, whole: float, found: Prediction, way: Way | None
) -> Goodput:
    """Of a model of `whole` bytes with its optimizer state; `way` is the elastic one."""
    nodes = -(-found.workers // cluster.node.devices)
    load = failures.repair_s / failures.mtbf_s
    own = found.memory.parameters + found.memory.optimizer
    renewal = _renewal(failures, cluster, nodes, whole, own)
    waiting = waiting_share(load, failures.spares)
    interval_s = max(renewal.best_interval_s, found.step_s)
    shares = renewal.shares(interval_s, waiting)
    answers = [Answer("restart", found.strategy, found.step_s, shares, interval_s)]
    if way is not None:
        term, other = way
        state = (other.memory.parameters + other.memory.optimizer) * cluster.node.devices
        join_s = state / cluster.node_bytes_per_s
        there = 1 - missing_nodes(load, nodes, failures.spares) / nodes
        starting = min(1.0, (failures.start_s + join_s) / failures.mtbf_s / nodes)
        goes_on = getattr(term, "mode", "sync") == "async"  # no worker waits for another
        stops = Renewal(failures.mtbf_s, recovery_s=0.0 if goes_on else failures.detect_s + join_s)
        interval_s = other.step_s * max(1, term.meets_every)
        shares = stops.shares(interval_s, 1 - there * (1 - starting))
        name = "replicated" if term.has_servers else "elastic"
        answers.append(Answer(name, other.strategy, other.step_s, shares, interval_s))
    return Goodput(failures, nodes, whole, renewal, tuple(answers))


def _renewal(failures: Failures, cluster: Cluster, nodes: int, whole: float, own: float) -> Renewal:
    """What a checkpoint takes, of which a device has `own` bytes."""
    node = cluster.node
    way_out = cluster.node_bytes_per_s or math.inf  # a host without a network has its own disks
    storage = cluster.storage_bytes_per_s or STORAGE_BYTES_PER_S
    to_host = node.pcie.rate if node.pcie else cluster.device.memory_bytes_per_s / 2
    if failures.saves == "sharded":
        held_s = own * node.devices_per_pcie / to_host
        written_s = load_s = whole / min(storage, nodes * way_out)
    else:
        collects = way_out / node.nics if nodes > 1 else to_host
        held_s = max(0.0, whole - own) / collects + whole / to_host
        written_s = whole / min(storage, way_out)
        load_s = nodes * whole / min(storage, nodes * way_out)  # every node reads all
    if failures.saves == "wait":
        held_s = held_s + written_s
        written_s = 0.0
    recovery_s = failures.detect_s + failures.start_s + load_s
    return Renewal(failures.mtbf_s, held_s, written_s, recovery_s)
