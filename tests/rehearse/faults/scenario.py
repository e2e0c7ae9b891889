"""What a seed draws: a strategy, a model, and what goes wrong."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from shoal.strategy.strategy import as_strategy

Rule = Literal["equal", "mean", "log", "finite"]


class Kind(NamedTuple):
    """`rule`: what holds at the end of a run of this strategy.

    equal    the weights are those of one device, on every worker
    mean     the mean over workers is, for gradients that do not depend on the weights
    log      the weights are those that the leader's log gives: each push counts as it says
    finite   weights are finite, and where replicas agree they agree
    """

    strategy: str
    rule: Rule
    workers: tuple[int, ...] = (2, 3, 4, 5)
    has_servers: bool = False
    is_split: bool = False  # a replica has several workers
    is_linear: bool = False  # equal for plain SGD only
    loses: tuple[str, ...] = ()  # whose loss a run survives: "worker", "server"
    copies: int = 1  # of each server
    is_apart: bool = False  # each worker on a host of its own

    @property
    def saves_servers(self) -> bool:
        """Whether server processes can write checkpoints by themselves."""
        has_none = any(option in self.strategy for option in ("update", "placement"))
        return self.has_servers and not self.is_split and not has_none


SERVED = (1, 2, 3, 4, 5)
WORKERS, SERVERS, BOTH = ("worker",), ("server",), ("worker", "server")
KINDS = (
    Kind("ddp", "equal"),
    Kind('ddp(algorithm="ring")', "equal"),
    Kind('ddp(algorithm="tree")', "equal"),
    Kind("ddp(bucket_mb=0.0001)", "equal"),
    Kind('ddp(compress="int8")', "finite"),
    Kind("zero(1)", "equal"),
    Kind("zero(2)", "equal"),
    Kind("zero(3)", "equal"),
    Kind('mapreduce(batch="mini")', "equal"),
    Kind('gossip(graph="complete")', "equal"),
    Kind('gossip(graph="ring")', "mean"),
    Kind('gossip(graph="exponential")', "mean"),
    Kind('gossip(mode="async")', "finite"),
    Kind("hogwild", "mean"),
    Kind("localsgd(every=1)", "equal", is_linear=True),
    Kind("localsgd(every=3)", "mean"),
    Kind("localsgd(every=3, overlap=True, delay=2)", "mean"),
    Kind("localsgd(every=4, overlap=True, delay=2, fragments=2)", "mean"),
    Kind('localsgd(every=3, outer="nesterov(lr=0.7)")', "finite"),
    Kind('localsgd(every=3, compress="int4")', "finite"),
    Kind("ps", "equal", SERVED, True),
    Kind("ps(servers=2)", "equal", SERVED, True),
    Kind("ps(servers=3)", "equal", SERVED, True),
    Kind('ps(update="worker")', "equal", SERVED, True),
    Kind('ps(update="worker", servers=2)', "equal", SERVED, True),
    Kind('ps(placement="rank0")', "equal", SERVED, True),
    Kind('ps(placement="workers")', "equal", (2, 3, 4), True),
    Kind('ps(compress="int8")', "finite", SERVED, True),
    Kind("ps(quorum=0.5)", "log", SERVED, True, loses=WORKERS),
    Kind("ps(quorum=0.75)", "log", SERVED, True, loses=WORKERS),
    Kind('ps(quorum=0.5, late="fold")', "log", SERVED, True, loses=WORKERS),
    Kind("ps(quorum=0.5, servers=2)", "log", SERVED, True, loses=WORKERS),
    Kind('ps(quorum=0.75, late="fold", servers=2)', "log", SERVED, True, loses=WORKERS),
    Kind("ps(staleness=1)", "log", SERVED, True, loses=WORKERS),
    Kind("ps(staleness=2, servers=2)", "log", SERVED, True, loses=WORKERS),
    Kind('ps(mode="async")', "log", SERVED, True, loses=WORKERS),
    Kind('ps(mode="async", servers=2)', "log", SERVED, True, loses=WORKERS),
    Kind('ps(mode="async", placement="rank0")', "log", SERVED, True),
    Kind("ddp(elastic=True)", "equal", loses=WORKERS),
    Kind("zero(1, elastic=True)", "equal", loses=WORKERS),
    Kind("zero(2, elastic=True)", "equal", loses=WORKERS),
    Kind("zero(3, elastic=True)", "equal", loses=WORKERS),
    Kind("localsgd(every=2, elastic=True)", "finite", loses=WORKERS),
    Kind("gossip(elastic=True)", "finite", loses=WORKERS),
    Kind("ps(replicas=2)", "equal", SERVED, True, loses=SERVERS, copies=2),
    Kind("ps(replicas=3)", "equal", SERVED, True, loses=SERVERS, copies=3),
    Kind("ps(replicas=2, servers=2)", "equal", SERVED, True, loses=SERVERS, copies=2),
    Kind('ps(replicas=2, mode="async")', "log", SERVED, True, loses=BOTH, copies=2),
    Kind('ps(replicas=2, servers=2, mode="async")', "log", SERVED, True, loses=BOTH, copies=2),
    Kind("ps(replicas=2, quorum=0.5)", "log", SERVED, True, loses=BOTH, copies=2),
    Kind("ps(replicas=3, staleness=1)", "log", SERVED, True, loses=BOTH, copies=3),
    Kind("tp(2)", "equal", (2,), is_split=True),
    Kind("pp(2)", "equal", (2,), is_split=True),
    Kind("ddp + pp(2)", "equal", (4,), is_split=True),
    Kind("ddp + tp(2)", "equal", (4,), is_split=True),
    Kind("zero(1) + pp(2)", "equal", (4,), is_split=True),
    Kind("ps + pp(2)", "equal", (4,), True, is_split=True),
    Kind("ps + tp(2)", "equal", (4,), True, is_split=True),
    Kind('ps(mode="async") + pp(2)', "finite", (4,), True, is_split=True),
    Kind("ps(quorum=0.5) + pp(2)", "finite", (4,), True, is_split=True),
)
PAIRS = Kind('gossip(mode="async")', "mean", is_apart=True)  # half of those without `is_apart`
# what is promised of each step of a run, and not only of its end
PROMISING = tuple(kind for kind in KINDS if kind.copies > 1 or "staleness" in kind.strategy)
EXACT = ("ddp", 'ddp(algorithm="tree")', "zero(1)", "ps", "ps(servers=2)", 'ps(placement="rank0")')


# ---------------------------------------------------------------------- faults


@dataclass(frozen=True)
class Slow:
    """A worker or a server computes so many times slower."""

    name: str
    factor: float


@dataclass(frozen=True)
class Jitter:
    """Steps last as long as a normal distribution says."""

    deviation: float


@dataclass(frozen=True)
class AnyOrder:
    """Threads that can run at a moment do so in any order."""


@dataclass(frozen=True)
class Stop:
    """A process does nothing for a while."""

    name: str
    at_s: float
    for_s: float


@dataclass(frozen=True)
class Delays:
    """A share of all messages is up to `most_s` late."""

    share: float
    most_s: float


@dataclass(frozen=True)
class Cut:
    """Nothing passes between one device and all others, until it heals."""

    device: int
    at_s: float
    for_s: float


@dataclass(frozen=True)
class Breaks:
    """Connections of workers break, each after up to so many bytes.

    The two ends learn it at moments of their own, up to `late_s` afterwards.
    """

    connections: int
    most_bytes: int
    late_s: float
    of_servers: bool = False  # connections between servers, too


End = Literal["connection", "process", "request"]
ENDS: tuple[End, ...] = ("connection", "process", "request", "request")


@dataclass(frozen=True)
class Interrupted:
    """What a worker pushes ends behind so many frames: with its connection, its process, or a
    request that fails before it is sent."""

    name: str
    frames: int
    ends: End


@dataclass(frozen=True)
class FullDisk:
    """The save with this number has room for so many bytes."""

    save: int
    num_bytes: int


@dataclass(frozen=True)
class ServerDisk:
    """Servers save every so many steps; these files find room for so many bytes alone."""

    every: int
    full: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class Kill:
    """A process is killed."""

    name: str
    at_s: float


@dataclass(frozen=True)
class Silent:
    """What is killed loses its host: its peers learn so long afterwards that it is gone."""

    for_s: float


@dataclass(frozen=True)
class Long:
    """Steps take so many times longer: as long as leases and other limits."""

    factor: float


@dataclass(frozen=True)
class Apart:
    """Each worker has a host of its own, and servers are on different ones."""


@dataclass(frozen=True)
class Restarts:
    """So many processes that are lost are started again, each after a while."""

    count: int
    after_s: float


Timed = Stop | Cut | Kill
Disks = FullDisk | ServerDisk
Lasting = Slow | Jitter | AnyOrder | Long | Apart
Untimed = Lasting | Delays | Breaks | Interrupted | Disks | Silent | Restarts
Fault = Timed | Untimed


@dataclass(frozen=True)
class Scenario:
    """One run; `model` is "counts", whose weights count samples, or "mlp"."""

    seed: int
    kind: Kind
    workers: int
    model: Literal["counts", "mlp"]
    samples: int
    batch: int
    epochs: int
    optimizer: Literal["sgd", "momentum", "adamw"] = "sgd"
    clip_norm: float | None = None
    exact: bool = False
    microbatches: int = 1
    saves: bool = False  # after each epoch
    faults: tuple[Fault, ...] = field(default=())

    def of(self, kind: type) -> list[Fault]:
        return [fault for fault in self.faults if isinstance(fault, kind)]

    @property
    def fault_names(self) -> list[str]:
        return sorted({type(fault).__name__ for fault in self.faults}) or ["none"]

    @property
    def kills(self) -> list[Kill]:
        return [fault for fault in self.faults if isinstance(fault, Kill)]

    @property
    def killed(self) -> list[str]:
        """Processes that end before their time."""
        interrupted = [fault for fault in self.faults if isinstance(fault, Interrupted)]
        ended = [fault.name for fault in interrupted if fault.ends != "connection"]
        return [*(kill.name for kill in self.kills), *ended]

    @property
    def may_fail(self) -> bool:
        """Whether a sentence is a good end: what is needed was lost, or away for too long."""
        if self._may_lose_too_much:
            return True
        if not (self.kind.has_servers or self.kind.is_apart):
            return False
        breaks = [fault for fault in self.faults if isinstance(fault, Breaks)]
        silent_s = sum(f.for_s for f in self.faults if isinstance(f, (Stop, Cut)))
        cut_s = max((f.for_s for f in self.faults if isinstance(f, Cut)), default=0.0)
        is_late = bool(breaks) and silent_s > 1.0
        return is_late or cut_s > 10.0 or any(each.of_servers for each in breaks)

    @property
    def has_whole_log(self) -> bool:
        """Whether one copy of the leader was there from the start to the end."""
        disturbed = [f.name for f in self.faults if isinstance(f, Stop)] + self.killed
        disturbed += ["server" for fault in self.faults if isinstance(fault, Cut)]
        if self.of(Apart) and any(f.most_s > 0.1 for f in self.faults if isinstance(f, Delays)):
            return self.kind.copies == 1  # leases of any of them may end
        servers = sum(name.startswith("server") for name in disturbed)
        return self.kind.copies == 1 or servers < self.kind.copies

    @property
    def _may_lose_too_much(self) -> bool:
        killed = [name.split()[0] for name in self.killed]
        if self.kind.strategy.startswith("zero") and len(killed) > 1:
            # a shard is on two workers, until both are lost before the others have noticed it
            away_s = sum(f.for_s for f in self.faults if isinstance(f, (Stop, Cut, Silent)))
            moments_s = [kill.at_s for kill in self.kills]
            if max(moments_s) - min(moments_s) < 0.1 + away_s:
                return True
        is_survived = set(killed) <= set(self.kind.loses)
        return not is_survived or killed.count("worker") >= self.workers or not self.has_whole_log


# ---------------------------------------------------------------------- drawing


def draw(seed: int) -> Scenario:
    drawn = random.Random(seed)
    kind = drawn.choice(PROMISING if drawn.random() < 0.3 else KINDS)
    if kind.strategy == PAIRS.strategy and drawn.random() < 0.5:
        kind = PAIRS
    workers = drawn.choice(kind.workers)
    is_exact = kind.strategy in EXACT and drawn.random() < 0.3
    model: Literal["counts", "mlp"] = "counts"
    if kind.rule in ("equal", "finite") and (is_exact or kind.is_split or drawn.random() < 0.5):
        model = "mlp"
    microbatches = 4 if is_exact else drawn.choice((1, 1, 2)) if model == "mlp" else 1
    if is_exact:
        any_number = as_strategy(kind.strategy).is_exact_at_any_number
        workers = drawn.choice((2, 3, 4) if any_number else (1, 2, 4))
    optimizer = "sgd"
    if model == "mlp" and not kind.is_linear:
        optimizer = drawn.choice(("sgd", "momentum", "adamw"))
    clips = model == "mlp" and not kind.is_linear and drawn.random() < 0.3
    scenario = Scenario(
        seed,
        kind,
        workers,
        model,
        samples=drawn.randrange(9, 30),
        batch=drawn.choice((5, 7, 8)),
        epochs=drawn.randrange(1, 4),
        optimizer=optimizer,  # type: ignore[arg-type]
        clip_norm=0.5 if clips else None,
        exact=is_exact,
        microbatches=microbatches,
        saves=not kind.loses and drawn.random() < 0.2,
    )
    faults = _faults(drawn, scenario)
    return Scenario(**{**vars(scenario), "faults": faults})


def names_of(scenario: Scenario) -> list[str]:
    """Processes that can be stopped, slow or killed."""
    ranks = [f"worker {rank}" for rank in range(scenario.workers)]
    is_apart = scenario.kind.has_servers and "placement" not in scenario.kind.strategy
    found = re.search(r"servers=(\d)", scenario.kind.strategy)
    servers = (int(found[1]) if found else 1) * scenario.kind.copies if is_apart else 0
    return [*ranks, *(f"server {index}" for index in range(servers))]


def _faults(drawn: random.Random, scenario: Scenario) -> tuple[Fault, ...]:
    names = names_of(scenario)
    length_s = 0.012 * scenario.epochs * scenario.samples / scenario.batch
    faults: list[Fault] = []

    def moment_s() -> float:
        return round(drawn.uniform(0.0, length_s), 4)

    def while_s(longest: float) -> float:
        """From a millisecond on; as often short as long."""
        return round(min(longest, 10 ** drawn.uniform(-3, 2)), 4)

    if drawn.random() < 0.4:
        faults.append(Slow(drawn.choice(names), drawn.choice((1.5, 3.0, 10.0))))
    if drawn.random() < 0.4:
        faults.append(Jitter(drawn.choice((0.1, 0.5))))
    if drawn.random() < 0.5:
        faults.append(AnyOrder())
    for _ in range(drawn.choice((0, 0, 0, 1, 2))):
        faults.append(Stop(drawn.choice(names), moment_s(), while_s(60.0)))
    if drawn.random() < 0.4:
        faults.append(Delays(drawn.choice((0.02, 0.2, 1.0)), drawn.choice((0.001, 0.02, 0.2))))
    if drawn.random() < 0.25:
        device = drawn.randrange(scenario.workers)
        faults.append(Cut(device, moment_s(), while_s(60.0)))
    if scenario.kind.has_servers and drawn.random() < 0.6:
        late_s = drawn.choice((0.0, 0.0, 0.01, 0.5))
        of_servers = "servers" in scenario.kind.strategy and drawn.random() < 0.1
        most_bytes = drawn.choice((200, 1000, 4000))
        faults.append(Breaks(drawn.choice((1, 3, 25)), most_bytes, late_s, of_servers))
    if scenario.kind.has_servers and drawn.random() < 0.3:
        worker = f"worker {drawn.randrange(scenario.workers)}"
        faults.append(Interrupted(worker, drawn.randrange(12), drawn.choice(ENDS)))
    if drawn.random() < (0.7 if scenario.kind.loses else 0.05):
        losable = [name for name in names if name.split()[0] in scenario.kind.loses]
        for _ in range(drawn.choice((1, 1, 2))):
            faults.append(Kill(drawn.choice(losable or names), moment_s()))
        if scenario.kind.loses and drawn.random() < 0.5:
            faults.append(Restarts(drawn.choice((1, 3)), drawn.choice((0.001, 0.02, 5.0))))
    if scenario.saves and drawn.random() < 0.6:
        faults.append(FullDisk(drawn.randrange(scenario.epochs), drawn.randrange(0, 2000)))
    if any(isinstance(fault, Kill) for fault in faults) and drawn.random() < 0.5:
        faults.append(Silent(drawn.choice((0.01, 0.05, 0.5, 30.0))))
    if scenario.kind.has_servers and drawn.random() < 0.25:
        long = Long(drawn.choice((30.0, 100.0)))
        faults = [_later(fault, long.factor) for fault in faults] + [long]
    may_be_apart = scenario.kind.copies > 1 and scenario.workers > 1
    if scenario.kind.is_apart or (may_be_apart and drawn.random() < 0.5):
        faults.append(Apart())
    if scenario.kind.saves_servers and drawn.random() < 0.25:
        full = tuple(sorted(drawn.sample(range(12), drawn.choice((0, 1, 3, 6)))))
        faults.append(ServerDisk(drawn.choice((1, 2)), full, drawn.randrange(2000)))
    is_killed = any(isinstance(fault, Kill) for fault in faults)
    if scenario.kind.copies > 1 and not is_killed and drawn.random() < 0.5:
        # nothing else: the head is back before the others have learned that it was lost
        return (Kill("server 0", round(length_s / 2, 4)), Restarts(3, 0.001))
    return tuple(faults)


def _later(fault: Fault, factor: float) -> Fault:
    if not isinstance(fault, Timed):
        return fault
    return replace(fault, at_s=round(fault.at_s * factor, 4))
