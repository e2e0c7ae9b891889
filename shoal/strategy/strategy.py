"""Strategy values and their notation: one text for Python, the command line, TOML and logs.

    ddp(bucket_mb=4) + tp(2) + pp(4, schedule="zb-h1")
    ----------------   -------------------------------
    how replicas       how one replica is split
    agree

A part is a frozen dataclass; the rule for each option stands beside its type. A `Strategy` joins
them. Text is parsed with `ast` and never evaluated, and whatever is wrong is a `StrategyError`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import KW_ONLY, Field, dataclass, field, fields, replace
from typing import Annotated, Any, TypeVar, get_type_hints

from shoal.errors import NotBuilt, StrategyError
from shoal.schedules.gossip import graphs as edges
from shoal.strategy.constraints import (
    MAX_NUMBER,
    Rule,
    clip,
    is_names,
    is_plan,
    one_of,
    optional,
    positive,
    show,
    text_like,
    whole,
    write,
)
from shoal.strategy.parser import MAX_TEXT, read_parts
from shoal.strategy.settings import outer_settings


class _EveryValue(Container[object]):
    def __contains__(self, value: object) -> bool:
        return True


EVERY_VALUE = _EveryValue()

# What has a runtime: part -> option -> the values that work. An option that is not listed works
# at its default only (so list `size`, which has none); an unlisted part does not work at all.
BUILT: dict[str, dict[str, Container[object]]] = {
    "single": {},
    "zero": {"stage": EVERY_VALUE},
    "ddp": {"algorithm": EVERY_VALUE, "bucket_mb": EVERY_VALUE, "compress": EVERY_VALUE},
    "hogwild": {"momentum": EVERY_VALUE},
    "mapreduce": {"batch": EVERY_VALUE},
    "localsgd": {"every": EVERY_VALUE, "outer": EVERY_VALUE, "compress": EVERY_VALUE},
    "gossip": {"graph": EVERY_VALUE, "mode": EVERY_VALUE},
    "ps": {
        **dict.fromkeys(("mode", "quorum", "late", "staleness"), EVERY_VALUE),
        **dict.fromkeys(("servers", "placement", "update", "compress"), EVERY_VALUE),
    },
    "tp": {"size": EVERY_VALUE, "plan": EVERY_VALUE, "sequence": EVERY_VALUE},
    "pp": dict.fromkeys(
        ("size", "schedule", "microbatches", "chunks", "recompute", "cuts", "balance"), EVERY_VALUE
    ),
}


SCHEDULES = ("inter-op", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "bfs")
GRAPHS = (
    *("ring", "torus", "hypercube", "exponential"),
    *("star", "complete", "one-peer", "random-regular"),
)

_SETTING = r"[a-z][a-z0-9_]*=[0-9]+(\.[0-9]+)?(e-?[0-9]+)?"
_FRACTION = r"(1|0\.0{0,9}[1-9][0-9]{0,9}|[1-9](\.[0-9]{1,9})?e-[1-9][0-9]?)"
_SYNC_OR_ASYNC = one_of("sync", "async")
_FLAG = Rule("True or False", lambda value: isinstance(value, bool))
_ALGORITHM = text_like('a name such as "ring" or "tree"', r"[A-Za-z_][A-Za-z0-9_-]*")
_COMPRESS = text_like(
    '"fp16", "bf16", "int8", "topk(0.01)", "powersgd(rank=4)" or "onebit"',
    rf"fp16|bf16|int8|onebit|topk\({_FRACTION}\)|powersgd\(rank=[1-9][0-9]{{0,5}}\)",
)
_GRAPH_TEXT = text_like(
    f"one of {', '.join(GRAPHS)}, a path that ends in .txt, .csv or .edges, edges such as "
    '"edges:0-1,1-2,2-0", or a networkx graph',
    "|".join(GRAPHS)
    + r"|random-regular\(degree=[0-9]{1,3}(, ?seed=[0-9]{1,9})?\)"
    + rf"|{edges.PATTERN}|(?!{edges.INLINE}).+\.(txt|csv|edges)",
)
_GRAPH = Rule(
    _GRAPH_TEXT.allowed,
    lambda value: edges.is_networkx(value) or _GRAPH_TEXT.accepts(value),
    lambda value: edges.write_edges(value) if edges.is_networkx(value) else value,
)
_OUTER = text_like(
    'an optimizer such as "nesterov(lr=0.7)"',
    rf"[a-z][a-z0-9_]*(\({_SETTING}(, ?{_SETTING})*\))?",
)
_PLAN = Rule(
    'a dict of module names to "column" or "row"', is_plan, lambda v: dict(sorted(v.items()))
)
_NAMES = Rule("a list of module names", is_names, tuple)


@dataclass(frozen=True)
class Part:
    """One term of a strategy. Its name in the notation is its class name in small letters."""

    def __post_init__(self) -> None:
        for option, rule in _RULES[type(self)].items():
            value = getattr(self, option)
            if not rule.accepts(value):
                raise StrategyError(
                    f"{self.name}: {option}={show(value)} is not allowed; "
                    f"{option} must be {rule.allowed}"
                )
            object.__setattr__(self, option, rule.keep(value))
        self._check_together()

    def _check_together(self) -> None:
        """Refuse options that are fine one by one and contradict each other."""

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def __add__(self, other: Part | Strategy) -> Strategy:
        return as_strategy(self) + other

    def __str__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        words = [_write_option(f, getattr(self, f.name)) for f in changed]
        return f"{self.name}({', '.join(words)})" if words else self.name


class SyncPart(Part):
    """How replicas agree."""

    @property
    def in_lockstep(self) -> bool:
        """Whether replicas take every step together, from the same weights."""
        return True

    def check(self, replicas: int) -> None:
        """Refuse what cannot work on so many replicas."""

    @property
    def takes_everything(self) -> bool:
        """Whether a step trains on the whole dataset, and a batch is what is computed at a time."""
        return False

    @property
    def takes_turns(self) -> bool:
        """Whether replicas take whole batches in turns, instead of a part of each."""
        return False


@dataclass(frozen=True)
class Single(SyncPart):
    """One replica, which has nobody to agree with."""


@dataclass(frozen=True, kw_only=True)
class Ddp(SyncPart):
    """Replicas add up their gradients with an all-reduce, bucket by bucket."""

    algorithm: Annotated[str, _ALGORITHM] = "auto"
    bucket_mb: Annotated[float, positive(MAX_NUMBER)] = 25
    compress: Annotated[str | None, optional(_COMPRESS)] = None


@dataclass(frozen=True)
class Zero(SyncPart):
    """Replicas share out optimizer state (1), gradients too (2), parameters too (3)."""

    stage: Annotated[int, one_of(1, 2, 3)] = 1


@dataclass(frozen=True, kw_only=True)
class Ps(SyncPart):
    """Servers hold the weights; workers push gradients and pull weights."""

    mode: Annotated[str, _SYNC_OR_ASYNC] = "sync"
    quorum: Annotated[float | None, optional(positive(1))] = None
    late: Annotated[str, one_of("drop", "fold")] = "drop"
    staleness: Annotated[int | None, optional(whole(0))] = None
    servers: Annotated[int, whole(1)] = 1
    placement: Annotated[str, one_of("servers", "rank0", "workers")] = "servers"
    update: Annotated[str, one_of("server", "worker")] = "server"
    compress: Annotated[str | None, optional(_COMPRESS)] = None

    @property
    def relaxations(self) -> list[str]:
        """The options given that let the server go on without waiting for every worker."""
        given = {"quorum": self.quorum is not None, "staleness": self.staleness is not None}
        given['mode="async"'] = self.mode == "async"
        return [option for option, is_given in given.items() if is_given]

    @property
    def waits_for_all(self) -> bool:
        """Whether every worker is part of every step."""
        return not self.relaxations or self.staleness == 0

    @property
    def in_lockstep(self) -> bool:
        return self.waits_for_all

    def _check_together(self) -> None:
        if len(self.relaxations) > 1:
            raise StrategyError(
                f"ps: {' and '.join(self.relaxations)} exclude each other; "
                "each is a rule of its own for how long the server waits"
            )
        if self.late != "drop" and self.quorum is None:
            raise StrategyError(f'ps: late="{self.late}" needs quorum; else nothing is ever late')
        if self.update == "worker" and not self.waits_for_all:
            raise StrategyError(
                f'ps: update="worker" and {self.relaxations[0]} exclude each other; workers that '
                "update by themselves have to see every sum"
            )
        if self.placement == "rank0" and self.servers > 1:
            raise StrategyError(
                f'ps: servers={self.servers} and placement="rank0" exclude each other; '
                "rank 0 has room for one server"
            )


@dataclass(frozen=True, kw_only=True)
class Gossip(SyncPart):
    """Replicas average their weights with their neighbours in a graph.

    A networkx graph is kept as text, "edges:…"; its edge attribute "weight" is what a worker
    takes of its neighbour's weights.
    """

    graph: Annotated[str, _GRAPH] = "ring"
    mode: Annotated[str, _SYNC_OR_ASYNC] = "sync"

    @property
    def in_lockstep(self) -> bool:
        return self.graph == "complete" and self.mode == "sync"

    def check(self, replicas: int) -> None:
        from shoal.schedules.gossip.mixing import mixing_for  # networkx: only where it is needed

        mixing_for(self.graph, replicas)


@dataclass(frozen=True, kw_only=True)
class Hogwild(SyncPart):
    """Workers update one copy of the weights in shared memory, without locks."""

    momentum: Annotated[bool, _FLAG] = False

    @property
    def in_lockstep(self) -> bool:
        return False

    @property
    def takes_turns(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Mapreduce(SyncPart):
    """Map: the gradients of a share of the samples; reduce: their sum and one update."""

    batch: Annotated[str, one_of("full", "mini")] = "full"

    @property
    def takes_everything(self) -> bool:
        return self.batch == "full"


@dataclass(frozen=True, kw_only=True)
class Localsgd(SyncPart):
    """Replicas train alone for `every` steps, then average or take an outer step."""

    every: Annotated[int, whole(1)] = 16
    outer: Annotated[str | None, optional(_OUTER)] = None
    compress: Annotated[str | None, optional(_COMPRESS)] = None

    @property
    def in_lockstep(self) -> bool:
        return self.every == 1

    def _check_together(self) -> None:
        if self.outer is not None:
            outer_settings(self.outer)


@dataclass(frozen=True)
class Tp(Part):
    """Tensor parallelism: matrices are split by column or row over `size` workers."""

    size: Annotated[int, whole(1)]
    _: KW_ONLY
    plan: Annotated[Mapping[str, str] | None, optional(_PLAN)] = field(default=None, hash=False)
    sequence: Annotated[bool, _FLAG] = False


@dataclass(frozen=True)
class Pp(Part):
    """Pipeline parallelism: layers are cut into stages over `size` workers."""

    size: Annotated[int, whole(1)]
    _: KW_ONLY
    schedule: Annotated[str, one_of(*SCHEDULES)] = "1f1b"
    microbatches: Annotated[int | None, optional(whole(1))] = None
    chunks: Annotated[int | None, optional(whole(1))] = None
    recompute: Annotated[bool, _FLAG] = False
    cuts: Annotated[Sequence[str] | None, optional(_NAMES)] = None
    balance: Annotated[str, one_of("weights", "measured")] = "weights"


single = Single
ddp = Ddp
zero = Zero
ps = Ps
gossip = Gossip
hogwild = Hogwild
mapreduce = Mapreduce
localsgd = Localsgd
tp = Tp
pp = Pp
_KINDS = (Single, Ddp, Zero, Ps, Gossip, Hogwild, Mapreduce, Localsgd, Tp, Pp)
PARTS: dict[str, type[Part]] = {kind.__name__.lower(): kind for kind in _KINDS}
WHY_NOT_SPLIT = {
    "hogwild": "each worker runs the whole model and waits for nobody, "
    "and the pieces of a split model wait for each other",
    "mapreduce": "a map task is the whole model on one worker, so that another can run it again",
}


def _rules(kind: type[Part]) -> dict[str, Rule]:
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name].__metadata__[0] for f in fields(kind)}


_RULES = {kind: _rules(kind) for kind in PARTS.values()}


def _write_option(option: Field[Any], value: object) -> str:
    return f"{option.name}={write(value)}" if option.kw_only else write(value)


@dataclass(frozen=True)
class Layout:
    """How many replicas there are, and over how many workers each one is split."""

    replicas: int
    tp: int
    pp: int


@dataclass(frozen=True)
class Strategy:
    """At most one way to agree, one tp and one pp; `str()` gives the notation.

    `sync=None` means ddp when workers are left over for further replicas, else single; so
    `single` beside tp or pp says nothing more and is dropped.
    """

    sync: SyncPart | None = None
    tp: Tp | None = None
    pp: Pp | None = None

    def __post_init__(self) -> None:
        for value, kind in ((self.sync, SyncPart), (self.tp, Tp), (self.pp, Pp)):
            if not isinstance(value, kind | None):
                raise StrategyError(f"a strategy is made of parts, and {show(value)} is none")
        split = self.tp or self.pp
        if split and isinstance(self.sync, Single):
            object.__setattr__(self, "sync", None)
        if split and self.sync and self.sync.name in WHY_NOT_SPLIT:
            why = WHY_NOT_SPLIT[self.sync.name]
            raise StrategyError(f"{self.sync.name} + {split.name} makes no sense: {why}")
        if not 0 < len(str(self)) <= MAX_TEXT:
            raise StrategyError(f"a strategy has a part and at most {MAX_TEXT} characters of text")

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for part in (self.sync, self.tp, self.pp) if part is not None)

    def __add__(self, other: Part | Strategy) -> Strategy:
        if not isinstance(other, Part | Strategy):
            return NotImplemented
        return _join([*self.parts, *as_strategy(other).parts])

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts))

    @property
    def is_synchronous(self) -> bool:
        """Whether the result should be the single-device one, up to rounding."""
        match self.sync:
            case Hogwild():
                return False
            case Localsgd(every=every, outer=outer, compress=compress):
                return every == 1 and outer is None and compress is None  # for plain SGD
            case Gossip() as part:
                return part.in_lockstep
            case Ps(waits_for_all=waits_for_all, compress=compress):
                return waits_for_all and compress is None
            case Ddp(compress=compress):
                return compress is None
        return True

    @property
    def reference(self) -> Strategy:
        """What one worker runs to give the result that a synchronous strategy is to give."""
        whole = self.sync is not None and self.sync.takes_everything
        return self if whole else Strategy(Single())

    @property
    def survives_loss(self) -> bool:
        """Whether the other replicas go on when a worker is killed.

        Where nobody waits for all, and no replica holds what the others need: none but the first
        (see `needs`) may host servers. The loss of a worker is that of its replica.
        """
        match self.sync:
            case Ps(placement="workers"):
                return False
            case Ps(mode=mode, quorum=quorum, staleness=staleness):
                return mode == "async" or (quorum or 1) < 1 or bool(staleness)
            case Gossip(mode="async") | Hogwild():
                return True
        return False

    @property
    def starts_apart(self) -> bool:
        """Whether workers can begin without one that is lost before it has come.

        The workers of a split replica meet at the start.
        """
        is_whole = self.tp is None and self.pp is None
        return self.survives_loss and isinstance(self.sync, Ps) and is_whole

    def needs(self, rank: int) -> bool:
        """Whether the run fails with this worker even if it survives the loss of others."""
        hosts = isinstance(self.sync, Ps) and self.sync.placement == "rank0"
        return hosts and rank < self._workers_of_replica

    @property
    def _workers_of_replica(self) -> int:
        return (self.tp.size if self.tp else 1) * (self.pp.size if self.pp else 1)

    def servers(self, workers: int) -> int:
        """How many processes a launcher has to start beside the workers."""
        part = self.sync_for(workers)
        return part.servers if isinstance(part, Ps) and part.placement == "servers" else 0

    def layout(self, workers: int) -> Layout:
        """Divide the workers: tp x pp of them make a replica, and none may be left over."""
        if not whole(1).accepts(workers):
            raise StrategyError(f"workers={show(workers)} must be {whole(1).allowed}")
        there = f"there {'is' if workers == 1 else 'are'} {workers}"
        if isinstance(self.sync, Single) and workers > 1:
            raise StrategyError(f"single runs on one worker, and {there}: did you mean ddp?")
        tp_size, pp_size = (part.size if part else 1 for part in (self.tp, self.pp))
        needed = self._workers_of_replica
        if workers < needed:
            raise StrategyError(f"{self} needs at least {needed} workers, and {there}")
        if workers % needed:
            raise StrategyError(f"{self} needs a multiple of {needed} workers, and {there}")
        layout = Layout(workers // needed, tp_size, pp_size)
        self.sync_for(layout.replicas).check(layout.replicas)
        return layout

    def sync_for(self, replicas: int) -> SyncPart:
        """The sync part, or what its absence means for this many replicas."""
        return self.sync or (Ddp() if replicas > 1 else Single())


P = TypeVar("P", bound=Part)


def _join(parts: Sequence[Part]) -> Strategy:
    return Strategy(
        _at_most_one([part for part in parts if isinstance(part, SyncPart)], "way to agree"),
        _at_most_one([part for part in parts if isinstance(part, Tp)], "tp"),
        _at_most_one([part for part in parts if isinstance(part, Pp)], "pp"),
    )


def _at_most_one(parts: Sequence[P], role: str) -> P | None:
    if len(parts) > 1:
        both = f"{clip(str(parts[0]))} + {clip(str(parts[1]))}"
        raise StrategyError(f"{both}: a strategy has at most one {role}; keep one of the two")
    return parts[0] if parts else None


def as_strategy(value: str | Strategy | Part) -> Strategy:
    """Whatever names a strategy, as a strategy."""
    if isinstance(value, Strategy):
        return value
    return _join([value]) if isinstance(value, Part) else parse(value)


def require_built(strategy: Strategy) -> None:
    """Refuse what the notation has and the runtime has not, before anything starts."""
    _require_together(strategy)
    for part in strategy.parts:
        if part.name not in BUILT:
            raise NotBuilt(
                f"{part.name} is not built yet: it is part of the notation, but this version "
                f"has no runtime for it; {' and '.join(sorted(BUILT))} work"
            )
        for option in fields(part):
            value = getattr(part, option.name)
            if value not in BUILT[part.name].get(option.name, (option.default,)):
                raise NotBuilt(
                    f"{part.name}({_write_option(option, value)}) is not built yet: {option.name} "
                    "is part of the notation, but this version has no runtime for that value"
                )


def _require_together(strategy: Strategy) -> None:
    sync = strategy.sync
    for part in (strategy.tp, strategy.pp):
        if part is None or part.size == 1:
            continue
        if isinstance(sync, Gossip) and sync.mode == "async":
            raise NotBuilt(
                f"{sync} + {part} is not built yet: the workers of a replica would have to hear "
                f"the same of other replicas; take {replace(sync, mode='sync')} + {part}"
            )


def parse(text: str) -> Strategy:
    """Read the notation. Every failure is a StrategyError of one sentence."""
    return _join(read_parts(text, PARTS))
