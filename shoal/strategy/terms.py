"""The terms that a strategy is made of.

A new way to agree is a class here, with its name below, and a plan in `shoal/sync/NAME.py`. The
parser, `import shoal`, `shoal compare` and the tests of memory find it by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from shoal.errors import NotBuilt, StrategyError
from shoal.schedules import user
from shoal.schedules.user_proof import proven_collective, proven_pipeline
from shoal.strategy.base import Batches, ElasticOption, SyncTerm, Term
from shoal.strategy.constraints import (
    MAX_NUMBER,
    one_of,
    optional,
    positive,
    whole,
    write,
)
from shoal.strategy.options import (
    ALGORITHM,
    COMPRESS,
    FLAG,
    GRAPH,
    GRAPHS_OF_ANY_NUMBER,
    NAMES,
    OUTER,
    PLAN,
    QUORUM,
    SCHEDULE,
    SYNC_OR_ASYNC,
)
from shoal.strategy.settings import outer_settings

MAX_LAG = 64  # operations that the last replica may be behind under consistency="eventual"
MAX_REPLICAS = 16  # each push passes through all of them, one after the other

__all__ = [
    "cp",
    "ddp",
    "ep",
    "gossip",
    "hogwild",
    "localsgd",
    "mapreduce",
    "pp",
    "ps",
    "single",
    "tp",
    "zero",
]


@dataclass(frozen=True)
class Single(SyncTerm):
    """One replica: there is nothing to agree on."""

    compared: ClassVar[tuple[str, ...]] = ()  # always, as the reference

    sync_module: ClassVar[str] = "shoal.sync.local"

    @property
    def communicates(self) -> bool:
        return False

    def check(self, replicas: int) -> None:
        if replicas > 1:
            raise StrategyError(
                f"single runs on one worker, and there are {replicas}: did you mean ddp?"
            )


@dataclass(frozen=True, kw_only=True)
class Ddp(ElasticOption):
    """Replicas add up their gradients with an all-reduce, bucket by bucket."""

    compared: ClassVar[tuple[str, ...]] = (
        "ddp",
        'ddp(algorithm="ring")',
        'ddp(compress="int8")',
        'ddp(compress="powersgd(rank=4)")',
    )

    algorithm: Annotated[str, ALGORITHM] = "auto"
    bucket_mb: Annotated[float, positive(MAX_NUMBER)] = 25
    compress: Annotated[str | None, optional(COMPRESS)] = None
    elastic: Annotated[bool, FLAG] = False  # workers leave and join between two steps

    def _check_options(self) -> None:
        self.refuse_compression()
        if self.elastic and self.algorithm != "auto":
            raise StrategyError(
                f"ddp(elastic=True) takes no algorithm, and {self.algorithm!r} is given: its group "
                "is one of shared memory, which has its own"
            )

    @property
    def equals_single(self) -> bool:
        return self.compress is None

    @property
    def is_exact_at_any_number(self) -> bool:
        return True

    @property
    def collective_algorithm(self) -> str | None:
        return None if self.algorithm == "auto" else self.algorithm

    def check(self, replicas: int) -> None:
        if replicas > 1 and user.is_user_function(self.algorithm):
            proven_collective(self.algorithm, "all_reduce", replicas)


@dataclass(frozen=True)
class Zero(ElasticOption):
    """Replicas shard optimizer state (1), gradients too (2), parameters too (3)."""

    compared: ClassVar[tuple[str, ...]] = ("zero(1)", "zero(2)", "zero(3)")

    stage: Annotated[int, one_of(1, 2, 3)] = 1
    elastic: Annotated[bool, FLAG] = field(default=False, kw_only=True)  # workers leave and join
    copies: Annotated[int, whole(1)] = field(default=1, kw_only=True)  # of each shard, if elastic

    def _check_options(self) -> None:
        if not self.elastic and self.copies != 1:
            raise StrategyError(
                f"zero: copies={self.copies} is for elastic=True: without it no worker holds a "
                "copy of the shard of another one"
            )

    @property
    def shards_state(self) -> bool:
        return True

    @property
    def shard_copies(self) -> int:
        """On how many other workers a shard is."""
        return self.copies if self.elastic else 0

    def with_whole_parameters(self) -> Zero:
        return replace(self, stage=min(self.stage, 2))

    @property
    def is_exact_at_any_number(self) -> bool:
        return self.elastic

    @property
    def why_not_back(self) -> str | None:
        return None if self.elastic else f"its workers stay the same: take {self.as_elastic()}"


@dataclass(frozen=True, kw_only=True)
class Ps(SyncTerm):
    """Servers hold the weights; workers push gradients and pull weights."""

    compared: ClassVar[tuple[str, ...]] = (
        "ps",
        "ps(quorum=0.75)",
        "ps(staleness=2)",
        'ps(mode="async")',
    )

    sync_module: ClassVar[str] = "shoal.sync.ps.plan"

    mode: Annotated[str, SYNC_OR_ASYNC] = "sync"
    quorum: Annotated[float | None, optional(QUORUM)] = None  # up to 1: a fraction; else a count
    late: Annotated[str, one_of("drop", "fold")] = "drop"
    staleness: Annotated[int | None, optional(whole(0))] = None
    servers: Annotated[int, whole(1)] = 1
    replicas: Annotated[int, whole(1, MAX_REPLICAS)] = 1  # of each server, in a chain
    consistency: Annotated[str, one_of("strong", "eventual")] = "strong"  # among replicas
    placement: Annotated[str, one_of("servers", "rank0", "workers")] = "servers"
    on: Annotated[str, one_of("cpu", "cuda")] = "cpu"  # where servers keep weights and update
    update: Annotated[str, one_of("server", "worker")] = "server"
    compress: Annotated[str | None, optional(COMPRESS)] = None

    @property
    def relaxations(self) -> list[str]:
        """The options given that let the server continue without waiting for every worker."""
        given = {"quorum": self.quorum is not None, "staleness": self.staleness is not None}
        given['mode="async"'] = self.mode == "async"
        return [option for option, is_given in given.items() if is_given]

    @property
    def lockstep(self) -> bool:
        return not self.relaxations or self.staleness == 0

    @property
    def equals_single(self) -> bool:
        return self.lockstep and self.compress is None

    @property
    def survives_loss(self) -> bool:
        is_relaxed = self.mode == "async" or (self.quorum or 1) != 1 or bool(self.staleness)
        return is_relaxed and self.placement != "workers"

    @property
    def starts_apart(self) -> bool:
        return self.survives_loss

    @property
    def takes_back(self) -> bool:
        return self.survives_loss

    def taking_back(self, replicas: int) -> Ps:
        """Where all are waited for: wait for those that are there."""
        waits_for_all = self.lockstep or self.quorum == 1
        is_apart = self.update == "server" and self.placement != "workers"
        if not (waits_for_all and is_apart and replicas > 1):
            return self
        return replace(self, staleness=None, quorum=replicas)

    @property
    def why_not_back(self) -> str | None:
        if self.update == "worker":
            return (
                'with update="worker" every worker has to see every sum; use update="server", the '
                "default"
            )
        if self.placement == "workers":
            return (
                'with placement="workers" each worker hosts a server, which is lost with it; use '
                'placement="servers", the default'
            )
        return 'each step waits for all workers; use ps(quorum=…) or ps(mode="async")'

    @property
    def needs_first_replica(self) -> bool:
        return self.placement == "rank0"

    @property
    def has_servers(self) -> bool:
        return True

    @property
    def server_processes(self) -> int:
        return self.servers * self.replicas if self.placement == "servers" else 0

    @property
    def why_no_server_processes(self) -> str:
        host = "worker 0 hosts the server" if self.placement == "rank0" else "each worker hosts one"
        return (
            f'with placement="{self.placement}" {host}; name the worker, or use '
            'placement="servers", the default'
        )

    @property
    def server_replicas(self) -> int:
        return self.replicas

    @property
    def server_consistency(self) -> str:
        return self.consistency

    @property
    def promise(self) -> str | None:
        if self.replicas == 1:
            return None
        if self.consistency == "strong":
            return (
                f"strong: a push is acknowledged when all {self.replicas} replicas of a server "
                "have it, and every pull sees it; no acknowledged push is lost while one of "
                "them lives"
            )
        return (
            f"eventual: a push is acknowledged when the first of {self.replicas} replicas of a "
            f"server has it; pulls may lack the last {MAX_LAG} pushes, and the loss of that "
            "replica may undo as many"
        )

    def in_own_loop(self) -> Ps:
        """Where all workers wait, servers add up: the script sees gradients before the update."""
        return replace(self, update="worker") if self.lockstep else self

    def check(self, replicas: int) -> None:
        if self.on == "cuda" and self.placement == "servers":
            raise StrategyError(
                'ps(on="cuda") puts servers on the GPUs of workers: add placement="rank0" or '
                'placement="workers"'
            )
        if self.quorum is not None and self.quorum > max(1, replicas):
            there = f"there {'is' if replicas == 1 else 'are'} {replicas}"
            raise StrategyError(
                f"ps: quorum={self.quorum} needs as many workers that push, and {there}; write a "
                "smaller number, or a fraction such as 0.75"
            )

    def check_server_saves(self, workers_of_replica: int) -> None:
        if self.update == "worker":
            raise StrategyError(
                f"--server-checkpoint saves what servers hold, and with {self} workers hold the "
                "weights: use job.save"
            )
        if workers_of_replica > 1:
            raise StrategyError(
                "--server-checkpoint needs whole replicas, and this strategy splits each of them "
                f"over {workers_of_replica} workers: use job.save"
            )

    def _check_options(self) -> None:
        if len(self.relaxations) > 1:
            raise StrategyError(
                f"ps: {' and '.join(self.relaxations)} exclude each other; "
                "each is a rule of its own for how long the server waits"
            )
        if self.late != "drop" and self.quorum is None:
            raise StrategyError(f'ps: late="{self.late}" needs quorum; else nothing is ever late')
        if self.update == "worker" and not self.lockstep:
            raise StrategyError(
                f'ps: update="worker" and {self.relaxations[0]} exclude each other; workers that '
                "update by themselves have to see every sum"
            )
        self._check_replicas()
        if self.placement == "rank0" and self.servers > 1:
            raise StrategyError(
                f'ps: servers={self.servers} and placement="rank0" exclude each other; '
                "rank 0 has room for one server"
            )

    def _check_replicas(self) -> None:
        if self.replicas > 1 and self.on != "cpu":
            raise StrategyError(
                f'ps: replicas={self.replicas} and on="{self.on}" exclude each other; the GPU of a '
                "worker ends with it, and replicas are processes of their own"
            )
        if self.replicas > 1 and self.placement != "servers":
            raise StrategyError(
                f'ps: replicas={self.replicas} and placement="{self.placement}" exclude each '
                "other; a replica has to outlive the process it copies, so each is a process of "
                'its own (placement="servers")'
            )
        if self.consistency != "strong" and self.replicas == 1:
            raise StrategyError(
                f'ps: consistency="{self.consistency}" needs replicas, as in replicas=3; with one '
                "copy of the weights there is nothing that could lag"
            )
        if self.consistency != "strong" and self.update == "worker":
            raise StrategyError(
                f'ps: consistency="{self.consistency}" and update="worker" (as in loops with '
                "job.setup) exclude each other; workers that update by themselves have to see "
                "every sum, and the loss of a server may undo some"
            )


@dataclass(frozen=True, kw_only=True)
class Gossip(ElasticOption):
    """Replicas average their weights with their neighbours in a graph.

    A networkx graph is kept as text, "edges:…"; its edge attribute "weight" is what a worker
    takes of its neighbour's weights.
    """

    compared: ClassVar[tuple[str, ...]] = (
        'gossip(graph="complete")',
        'gossip(graph="ring")',
        'gossip(graph="ring", mode="async")',
    )

    graph: Annotated[str, GRAPH] = "ring"
    mode: Annotated[str, SYNC_OR_ASYNC] = "sync"
    elastic: Annotated[bool, FLAG] = False  # workers leave and join between two steps

    def _check_options(self) -> None:
        if not self.elastic:
            return
        if self.mode == "async":
            raise StrategyError(
                'gossip(mode="async") takes no elastic=True: its workers leave and come back '
                "anyway, with --restart or --elastic"
            )
        if self.graph not in GRAPHS_OF_ANY_NUMBER:
            raise StrategyError(
                f"gossip(graph={write(self.graph)}) takes no elastic=True: the graph is made again "
                f"for the workers that are left, so take one of {', '.join(GRAPHS_OF_ANY_NUMBER)}"
            )

    @property
    def lockstep(self) -> bool:
        return self.graph == "complete" and self.mode == "sync"

    @property
    def equals_single(self) -> bool:
        return self.lockstep

    @property
    def survives_loss(self) -> bool:
        return self.elastic or self.mode == "async"

    @property
    def takes_back(self) -> bool:
        return self.survives_loss

    def as_elastic(self) -> SyncTerm:
        return self if self.mode == "async" else super().as_elastic()

    def check(self, replicas: int) -> None:
        from shoal.schedules.gossip.mixing import mixing_for  # networkx: only where it is needed

        mixing_for(self.graph, replicas)

    def check_split(self, split: Term) -> None:
        if self.mode == "async":
            raise NotBuilt(
                f"{self} + {split} is not built yet: the workers of a replica would read the "
                "shards of a neighbor at different steps, and these are of no one model; take"
                f" {replace(self, mode='sync')} + {split}"
            )


@dataclass(frozen=True, kw_only=True)
class Hogwild(SyncTerm):
    """Workers update one copy of the weights in shared memory, without locks."""

    momentum: Annotated[bool, FLAG] = False

    @property
    def batches(self) -> Batches:
        return Batches.IN_TURNS

    @property
    def lockstep(self) -> bool:
        return False

    @property
    def equals_single(self) -> bool:
        return False

    @property
    def survives_loss(self) -> bool:
        return True

    @property
    def takes_back(self) -> bool:
        return True

    @property
    def needs_one_host(self) -> bool:
        return True

    @property
    def why_not_split(self) -> str | None:
        return (
            "each worker runs the whole model asynchronously, "
            "and the workers of a split model wait for each other"
        )


@dataclass(frozen=True, kw_only=True)
class Mapreduce(SyncTerm):
    """Map: the gradients of a slice of the samples; reduce: their sum and one update."""

    compared: ClassVar[tuple[str, ...]] = ('mapreduce(batch="mini")', "mapreduce")

    batch: Annotated[str, one_of("full", "mini")] = "full"

    @property
    def batches(self) -> Batches:
        return Batches.WHOLE_DATASET if self.batch == "full" else Batches.SPLIT

    @property
    def why_not_own_loop(self) -> str | None:
        return "its master alone updates, with the gradients of all map tasks"

    @property
    def why_not_split(self) -> str | None:
        return "a map task is the whole model on one worker, so that another can run it again"


@dataclass(frozen=True, kw_only=True)
class Localsgd(ElasticOption):
    """Replicas train alone for `every` steps, then average or take an outer step."""

    compared: ClassVar[tuple[str, ...]] = (
        "localsgd(every=8)",
        'localsgd(every=8, outer="nesterov(lr=0.7)")',
    )

    every: Annotated[int, whole(1)] = 16
    outer: Annotated[str | None, optional(OUTER)] = None
    compress: Annotated[str | None, optional(COMPRESS)] = None
    elastic: Annotated[bool, FLAG] = False  # workers leave and join between two averages

    @property
    def meets_every(self) -> int:
        return self.every

    @property
    def lockstep(self) -> bool:
        return self.every == 1

    @property
    def round_steps(self) -> int:
        return self.every

    @property
    def equals_single(self) -> bool:
        """For plain SGD: momentum and weight decay are linear in the gradient, Adam is not."""
        return self.every == 1 and self.outer is None and self.compress is None

    def _check_options(self) -> None:
        if self.outer is not None:
            outer_settings(self.outer)
        self.refuse_compression()


@dataclass(frozen=True, kw_only=True)
class Tp(Term, role="tp"):
    """Tensor parallelism: matrices are split by column or row over `size` workers."""

    compared: ClassVar[tuple[str, ...]] = ("tp(2)",)

    size: Annotated[int, whole(1)] = field(kw_only=False)
    plan: Annotated[Mapping[str, str] | None, optional(PLAN)] = field(default=None, hash=False)
    sequence: Annotated[bool, FLAG] = False


@dataclass(frozen=True, kw_only=True)
class Ep(Term, role="ep"):
    """Expert parallelism: the experts of a mixture live on `size` workers, and tokens travel.

    `capacity` bounds the tokens that an expert takes, as a multiple of an even share; what is
    above it is dropped. `experts` names lists of experts that are not found by themselves.
    """

    compared: ClassVar[tuple[str, ...]] = ()

    size: Annotated[int, whole(1)] = field(kw_only=False)
    capacity: Annotated[float | None, optional(positive(1000))] = None
    experts: Annotated[Sequence[str] | None, optional(NAMES)] = None


@dataclass(frozen=True, kw_only=True)
class Cp(Term, role="cp"):
    """Context parallelism: every worker has some positions of each sequence."""

    compared: ClassVar[tuple[str, ...]] = ()

    size: Annotated[int, whole(1)] = field(kw_only=False)


@dataclass(frozen=True, kw_only=True)
class Pp(Term, role="pp"):
    """Pipeline parallelism: layers are cut into stages over `size` workers."""

    compared: ClassVar[tuple[str, ...]] = ("pp(2)",)

    size: Annotated[int, whole(1)] = field(kw_only=False)
    schedule: Annotated[str, SCHEDULE] = "1f1b"
    microbatches: Annotated[int | None, optional(whole(1))] = None
    chunks: Annotated[int | None, optional(whole(1))] = None
    recompute: Annotated[bool, FLAG] = False
    cuts: Annotated[Sequence[str] | None, optional(NAMES)] = None
    balance: Annotated[str, one_of("weights", "measured")] = "weights"

    def check(self) -> None:
        """Refuse a user's schedule that is wrong, as far as its micro-batches are known."""
        if not user.is_user_function(self.schedule):
            return
        if self.microbatches is None:
            user.load_function(self.schedule)
        else:
            proven_pipeline(self.schedule, self.size, self.microbatches, self.chunks)


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
ep = Ep
cp = Cp
