"""Terms that say how replicas agree; the parameter server's is in `ps_term.py`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from shoal.errors import NotBuilt, StrategyError
from shoal.schedules import user
from shoal.strategy.base import Batches, ElasticOption, SyncTerm, Term
from shoal.strategy.options import (
    ALGORITHM,
    COMPRESS,
    FLAG,
    GRAPH,
    GRAPHS_OF_ANY_NUMBER,
    MAX_NUMBER,
    OUTER,
    SYNC_OR_ASYNC,
    one_of,
    optional,
    outer_settings,
    positive,
    whole,
    write,
)

# workers of a host keep one copy of the weights, or read those of neighbours; None: where it pays
SharedWeightsOption = Annotated[bool | None, optional(FLAG)]


@dataclass(frozen=True)
class Single(SyncTerm):
    """One replica: there is nothing to agree on."""

    compared: ClassVar[tuple[str, ...]] = ()  # always, as the reference

    sync_module: ClassVar[str] = "shoal.sync.ddp"

    communicates = False

    def check(self, replicas: int) -> None:
        if replicas > 1:
            raise StrategyError(
                f"single runs on one worker, and there are {replicas}: did you mean ddp?"
            )


@dataclass(frozen=True, kw_only=True)
class Hogwild(SyncTerm):
    """Workers update one copy of the weights in shared memory, without locks."""

    momentum: Annotated[bool, FLAG] = False

    batches = Batches.IN_TURNS
    lockstep = False
    equals_single = False
    survives_loss = True
    takes_back = True
    needs_one_host = True
    shares_memory = True
    needs_cpu = True
    why_not_split = (
        "each worker runs the whole model asynchronously, "
        "and the workers of a split model wait for each other"
    )


@dataclass(frozen=True, kw_only=True)
class Mapreduce(SyncTerm):
    """Map: the gradients of a slice of the samples; reduce: their sum and one update."""

    compared: ClassVar[tuple[str, ...]] = ('mapreduce(batch="mini")', "mapreduce")

    batch: Annotated[str, one_of("full", "mini")] = "full"
    shared_weights: SharedWeightsOption = None

    @property
    def batches(self) -> Batches:
        return Batches.WHOLE_DATASET if self.batch == "full" else Batches.SPLIT

    why_not_own_loop = "its master alone updates, with the gradients of all map tasks"
    why_not_split = "a map task is the whole model on one worker, so that another can run it again"


@dataclass(frozen=True, kw_only=True)
class Localsgd(ElasticOption):
    """Replicas train alone for `every` steps, then average or take an outer step.

    With `overlap` they train on meanwhile, and apply the average `delay` steps later.
    """

    compared: ClassVar[tuple[str, ...]] = (
        "localsgd(every=8)",
        'localsgd(every=8, outer="nesterov(lr=0.7)")',
    )

    every: Annotated[int, whole(1)] = 16
    outer: Annotated[str | None, optional(OUTER)] = None
    compress: Annotated[str | None, optional(COMPRESS)] = None
    elastic: Annotated[bool, FLAG] = False  # workers leave and join between two averages
    overlap: Annotated[bool, FLAG] = False
    delay: Annotated[int | None, optional(whole(1))] = None  # of an overlapped average; None: every
    fragments: Annotated[int, whole(1)] = 1  # of the model, averaged in turns

    @property
    def meets_every(self) -> int:
        return self.every

    @property
    def steps_under_way(self) -> int:
        """How many steps after it was sent an average is applied."""
        return (self.delay or self.every) if self.overlap else 0

    @property
    def most_sent(self) -> int:
        """How many fragments are under way at a time."""
        return max(1, -(-self.steps_under_way * self.fragments // self.every))

    @property
    def lockstep(self) -> bool:
        return self.every == 1 and not self.overlap

    @property
    def equals_single(self) -> bool:
        """For plain SGD: momentum and weight decay are linear in the gradient, Adam is not."""
        return self.lockstep and self.outer is None and self.compress is None

    def _check_options(self) -> None:
        if self.outer is not None:
            outer_settings(self.outer)
        self.refuse_compression()
        if self.delay is not None and not self.overlap:
            raise StrategyError(f"localsgd: delay={self.delay} is for overlap=True")
        for option, value in (("delay", self.delay or 1), ("fragments", self.fragments)):
            if value > self.every:
                raise StrategyError(
                    f"localsgd: {option}={value} is more than every={self.every}: a fragment is "
                    "sent once in so many steps, after its last average has been applied"
                )
        if self.elastic and (self.overlap or self.fragments > 1):
            raise StrategyError(
                "localsgd(elastic=True) takes neither overlap nor fragments: after a loss workers "
                "return to where all had the same weights, and there they never have"
            )

    def check_split(self, split: Term) -> None:
        if self.fragments > 1:
            raise NotBuilt(
                f"{self} + {split} is not built yet: parameters that several workers of a replica "
                f"hold would be averaged at different steps; take {replace(self, fragments=1)}"
            )


@dataclass(frozen=True)
class Zero(ElasticOption):
    """Replicas shard optimizer state (1), gradients too (2), parameters too (3)."""

    compared: ClassVar[tuple[str, ...]] = ("zero(1)", "zero(2)", "zero(3)")

    stage: Annotated[int, one_of(1, 2, 3)] = 1
    elastic: Annotated[bool, FLAG] = field(default=False, kw_only=True)  # workers leave and join
    copies: Annotated[int, whole(1)] = field(default=1, kw_only=True)  # of each shard, if elastic
    shared_weights: SharedWeightsOption = field(default=None, kw_only=True)  # stages 1 and 2
    # optimizer state lies in the host's memory; gradients (2, 3) and parameters (3), too
    offload: Annotated[bool, FLAG] = field(default=False, kw_only=True)

    def _check_options(self) -> None:
        if not self.elastic and self.copies != 1:
            raise StrategyError(
                f"zero: copies={self.copies} is for elastic=True: without it no worker holds a "
                "copy of the shard of another one"
            )
        if self.offload and (self.elastic or self.shared_weights):
            other = "elastic" if self.elastic else "shared_weights"
            raise StrategyError(
                f"zero: offload=True and {other}=True exclude each other: in the host's memory a "
                "worker keeps what is its own; leave out one of them"
            )

    shards_state = True

    @property
    def same_bits(self) -> bool:
        """Under zero(3) a weight is on one rank alone: there is nothing to compare it with."""
        return self.stage < 3 and not self.elastic

    @property
    def shard_copies(self) -> int:
        """On how many other workers a shard is."""
        return self.copies if self.elastic else 0

    def among(self, replicas: int) -> SyncTerm:
        is_alone = replicas == 1 and not self.elastic and not self.offload
        return Single() if is_alone else self

    @property
    def may_share_weights(self) -> bool:
        return self.stage < 3 and not self.elastic and not self.offload

    def shards_parameters(self, replicas: int) -> bool:
        """Whether a replica holds a shard of the parameters between steps."""
        return self.stage == 3 and (replicas > 1 or self.elastic or self.offload)

    def with_whole_parameters(self) -> Zero:
        return replace(self, stage=min(self.stage, 2))

    @property
    def is_exact_at_any_number(self) -> bool:
        return self.elastic

    @property
    def why_not_back(self) -> str | None:
        return None if self.elastic else f"its workers stay the same: take {self.as_elastic()}"


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
    shared_weights: SharedWeightsOption = None
    elastic: Annotated[bool, FLAG] = False  # workers leave and join between two steps

    @property
    def mixing_graph(self) -> str:
        return self.graph

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

    equals_single = lockstep

    @property
    def shares_memory(self) -> bool:
        return self.mode == "async"

    @property
    def survives_loss(self) -> bool:
        return self.elastic or self.mode == "async"

    takes_back = survives_loss

    def as_elastic(self) -> SyncTerm:
        return self if self.mode == "async" else super().as_elastic()

    def check(self, replicas: int) -> None:
        from shoal.schedules.mixing import edges_for  # networkx: only where it is needed

        edges_for(self.graph, replicas)

    def check_split(self, split: Term) -> None:
        if self.mode == "async":
            raise NotBuilt(
                f"{self} + {split} is not built yet: the workers of a replica would read the "
                "shards of a neighbor at different steps, and these are of no one model; take"
                f" {replace(self, mode='sync')} + {split}"
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
    shared_weights: SharedWeightsOption = None

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
    def same_bits(self) -> bool:
        return not self.elastic

    is_exact_at_any_number = True

    def among(self, replicas: int) -> SyncTerm:
        is_alone = replicas == 1 and not self.elastic and self.compress is None
        return Single() if is_alone else self

    @property
    def may_share_weights(self) -> bool:
        """An algorithm that is named is one of an all-reduce."""
        wanted = self.shared_weights
        is_named = self.algorithm != "auto"
        return not self.elastic and wanted is not False and bool(wanted or not is_named)

    @property
    def collective_algorithm(self) -> str | None:
        return None if self.algorithm == "auto" else self.algorithm

    def check(self, replicas: int) -> None:
        if replicas > 1 and user.is_user_function(self.algorithm):
            from shoal.schedules.collectives.catalog import proven_collective

            proven_collective(self.algorithm, "all_reduce", replicas)
