"""What every term of a strategy has: options with constraints, a name, and traits.

A term is a frozen dataclass; the constraint on each option stands beside its type. Its name in the
notation is its class name in small letters. `TERMS` in terms.py is the list of all.

A `SyncTerm` says how replicas agree. Its traits (batches, lockstep, …) are what a launcher has to
know of it; what it does with tensors is its plan, in the file that `sync_module` names.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, ClassVar, Self, get_type_hints

from shoal.errors import StrategyError
from shoal.strategy.options import Constraint, names_file, show, write


class Batches(enum.Enum):
    """Which samples a replica trains on in a step."""

    SPLIT = "split"  # its slice of every global batch
    IN_TURNS = "in turns"  # a global batch of its own
    WHOLE_DATASET = "whole dataset"  # its slice of everything; a batch is computed at a time


@dataclass(frozen=True)
class Term:
    """One term of a strategy; `+` joins terms to a `Strategy`."""

    compared: ClassVar[tuple[str, ...]]  # what `shoal compare` runs of it by default
    role: ClassVar[str]  # "sync", "tp", "pp", "ep" or "cp": a strategy has at most one of each
    source: ClassVar[str | None] = None  # FILE.py:NAME of a user's own
    join: ClassVar[Callable[[Sequence[Any]], Any]]  # makes a Strategy; set by shoal.strategy

    def __init_subclass__(cls, role: str | None = None, abstract: bool = False) -> None:
        if role is not None:
            cls.role = role
        if not abstract and "compared" not in vars(cls):
            cls.compared = (cls.__name__.lower(),)

    def __post_init__(self) -> None:
        for option, constraint in constraints_of(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, option)
            if not constraint.accepts(value):
                raise StrategyError(
                    f"{self.name}: {option}={show(value)} is not allowed; "
                    f"{option} must be {constraint.allowed}"
                )
            object.__setattr__(self, option, constraint.keep(value))
        self._check_options()

    def _check_options(self) -> None:
        """Refuse options that are fine one by one and contradict each other."""

    @property
    def name(self) -> str:
        return type(self).source or type(self).__name__.lower()

    def without_files(self) -> Self:
        """With the defaults of the options that name a file of the user."""
        own = {f.name: f.default for f in fields(self) if names_file(getattr(self, f.name))}
        return replace(self, **own)

    def __add__(self, other: Any) -> Any:
        return Term.join([self, other])

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        values = [(f, write(getattr(self, f.name))) for f in changed]
        words = [f"{f.name}={value}" if f.kw_only else value for f, value in values]
        return f"{self.name}({', '.join(words)})" if words else self.name


@cache
def constraints_of(kind: type[Term]) -> dict[str, Constraint]:
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name].__metadata__[0] for f in fields(kind)}


class SyncTerm(Term, role="sync", abstract=True):
    """How replicas agree.

    The traits below are those of synchronous data parallelism; a term overrides what differs, as
    a class attribute, or as a property where it depends on its options.
    """

    sync_module: ClassVar[str]  # the module of its plan

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "sync_module" not in vars(cls):
            cls.sync_module = f"shoal.sync.{cls.__name__.lower()}"

    # ---- samples and steps
    batches: Batches = Batches.SPLIT  # which samples a replica trains on in a step
    lockstep: bool = True  # replicas take every step together, from the same weights
    meets_every: int = 0  # replicas that are not in lockstep meet after so many steps; 0: never
    same_bits: bool = False  # after a step all replicas have the same weights, bit for bit
    equals_single: bool = True  # the result is that of one device, up to rounding
    is_exact_at_any_number: bool = False  # exact=True allows any number of replicas
    shards_state: bool = False  # each replica owns the training state of a run of parameters
    offload: bool = False  # that state lies in the host's memory
    collective_algorithm: str | None = None  # the all-reduce by its name; None: the cheapest one
    mixing_graph: str | None = None  # over which replicas average their weights

    # ---- losses
    is_elastic: bool = False  # its group changes: replicas leave and join between two steps
    needs_first_replica: bool = False  # the run fails with replica 0, even if it survives others
    why_not_back: str | None = None  # which option keeps a lost worker from coming back

    # ---- where it runs
    needs_one_host: bool = False  # all workers share the memory of one host
    shares_memory: bool = False  # those of one host do, and survive losses there only
    needs_cpu: bool = False
    communicates: bool = True  # even if there is only one worker
    why_not_own_loop: str | None = None  # why it trains by `job.step` only

    # ---- servers
    has_servers: bool = False
    server_processes: int = 0  # that a launcher starts beside the workers
    why_no_server_processes: str = "this strategy starts no servers; ps does"
    server_replicas: int = 1  # processes that hold the same: server p is copy p % so many
    server_consistency: str = "strong"
    adds_up: bool = True  # servers sum pushes before an update
    who_waits: str = ""  # where some do not, in lines for a reader
    promise: str | None = None  # what copies of servers promise, in one sentence

    @property
    def survives_loss(self) -> bool:
        """Whether other replicas continue when a worker is killed, the first one aside."""
        return self.is_elastic

    @property
    def starts_apart(self) -> bool:
        """Whether replicas can start without one that was lost before the rendezvous."""
        return self.is_elastic

    @property
    def takes_back(self) -> bool:
        """Whether a worker that was lost can come back, as a new process, and go on."""
        return self.is_elastic

    @property
    def trains_complex_parameters(self) -> bool:
        """Whether parameters may be complex: not where servers or compressors see their shapes."""
        return not self.has_servers and getattr(self, "compress", None) is None

    @property
    def why_not_split(self) -> str | None:
        """Why it makes no sense where a replica is split over workers, or None."""
        if self.is_elastic:
            return "the workers of a split replica stay the same; leave out elastic=True"
        return None

    def as_elastic(self) -> SyncTerm:
        """This term with workers that leave and join, or as it is if they can anyway."""
        if self.takes_back:
            return self
        raise StrategyError(
            f"--elastic: workers of {self} cannot leave and join between two steps; those of ddp, "
            'zero, localsgd, gossip, ps(mode="async") and hogwild can'
        )

    def taking_back(self, replicas: int) -> SyncTerm:
        """The nearest term under which a worker that was lost can come back, or this one."""
        return self

    def among(self, replicas: int) -> SyncTerm:
        """This term, or `single` where one replica has nothing to exchange."""
        return self

    def in_own_loop(self) -> SyncTerm:
        """This term where the script calls the optimizer itself (`job.setup`)."""
        return self

    def with_whole_parameters(self) -> SyncTerm:
        """This term for parameters that are used outside of any module, so never gathered."""
        return self

    def check_server_saves(self, workers_of_replica: int) -> None:
        """Refuse periodic checkpoints where servers do not have what a checkpoint needs."""
        raise StrategyError(f"--server-checkpoint is for ps, and this run has -s {self}")

    def check(self, replicas: int) -> None:
        """Refuse what cannot work on so many replicas."""

    def check_split(self, split: Term) -> None:
        """Refuse a split replica for which there is no runtime; `split` has a size above 1."""


class ElasticOption(SyncTerm, abstract=True):
    """A term with the option elastic=True: workers leave and join while the others train."""

    elastic: bool

    @property
    def is_elastic(self) -> bool:
        return self.elastic

    def as_elastic(self) -> SyncTerm:
        options: dict[str, Any] = {"elastic": True}
        return replace(self, **options)

    @property
    def why_not_back(self) -> str | None:
        if self.elastic:
            return None
        return f"its workers stay the same: take {self.name}(elastic=True)"

    def refuse_compression(self) -> None:
        """What a lost worker has not sent yet, for a later step, would be lost with it."""
        if self.elastic and getattr(self, "compress", None) is not None:
            raise StrategyError(
                f"{self.name}(elastic=True) takes no compress: what a lost worker had not sent yet "
                "would be lost with it"
            )
