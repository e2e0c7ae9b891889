"""How replicas agree."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shoal.comm.call import all_reduce_bytes
from shoal.comm.group import Group
from shoal.comm.mesh import ReplicaGroup
from shoal.errors import BadInput
from shoal.replica.deferred_init import DeferredInit
from shoal.replica.flat_params import FlatParams
from shoal.runtime.config import RunConfig
from shoal.runtime.trace import SentBytes
from shoal.strategy.base import SyncTerm
from shoal.sync.optimizer_step import GradNorm, OptimizerStep

if TYPE_CHECKING:
    from shoal.replica.split.shard import ReplicaShard
    from shoal.sync.movable_shards import MovableShards
    from shoal.sync.ps.worker import ServerSaves


class StepTraffic(SentBytes):
    """Counts steps, and the bytes that groups send."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self.plain_bytes = 0

    def count(self, flat: FlatParams, group: Group) -> Group:
        """`group` of replicas as it is now, whose calls are counted."""
        self.plain_bytes = all_reduce_bytes(flat.grads.exchanged_bytes(), group.size)
        return group.counted(self)

    def report(self) -> dict[str, Any]:
        """Bytes that this worker has sent, and what uncompressed ddp sends in a step."""
        return {
            "steps": self.steps,
            "bytes_sent": self.total,
            "bytes_per_step": self.total / max(1, self.steps),
            "ddp_bytes_per_step": self.plain_bytes,
        }

    def summary(self) -> list[str]:
        if not self.total or not self.steps:
            return []
        num_bytes = self.total / self.steps
        return [
            f"each worker sent {num_bytes:,.0f} bytes a step, where ddp sends "
            f"{self.plain_bytes:,}: {self.plain_bytes / num_bytes:.1f} times less"
        ]


class Comeback(NamedTuple):
    """A worker that came back goes on with `step`; its earlier process had come to `lost_at`."""

    step: int
    lost_at: int


class Elastic:
    """What a sync does where the replicas of a run change. The defaults are those of a step that
    changes no weights before all of its communication is over.
    """

    movable: MovableShards | None = None  # in elastic runs, where each replica holds shards
    undo_steps: int = 0  # that a loss undoes, at most; 0: the update follows all communication
    is_agreed: bool = True  # replicas have communicated since the latest update
    is_committing: bool = False  # `commit` was interrupted: other replicas may have ended the step

    def commit(self) -> None:
        """Return when all replicas have ended the step, where `finish` waits for some of them.

        In an elastic run a step that a replica has committed is never undone.
        """

    def undo(self) -> None:
        """Weights and optimizer are again as they were when replicas agreed last."""
        self.is_committing = False

    def regroup(self) -> None:
        """The replicas are others than before: the group of an elastic run has changed."""


class Returning:
    """What a sync does where lost workers come back. The default is that none does."""

    is_skipped: bool = False  # set by `begin`: the other replicas have done this step already
    lowest_survivor: int = 0  # the lowest surviving replica, which saves and prints for all

    def skip(self) -> Tensor:
        """The step is skipped; returns the latest loss that is known."""
        return torch.zeros(())

    def come_back(self) -> Comeback | None:
        """Take the place of a process of this worker that was lost; None: it was never away."""
        return None

    def catch_up(self) -> None:
        """After `come_back`: take the present weights."""

    def meet(self, number: int, generations: Sequence[int]) -> None:
        """What follows is done by these processes: see `comm/members/meetings.py`."""


class Served:
    """What a sync has where servers hold the weights."""

    saves: ServerSaves | None = None  # where servers write checkpoints by themselves

    def row_store(self) -> Any:
        """Where rows of embeddings live that all replicas share; None: in each replica."""
        return None

    def server_tensors(self) -> list[Tensor]:
        """Tensors of a parameter server that lives in this worker, without shared ones."""
        return []


class Sync(Elastic, Returning, Served):
    """What happens around an engine's run. Every rank calls every method in the same order.

    The defaults are those of replicas that hold the same weights and own their optimizers.
    """

    flat: FlatParams
    update: OptimizerStep
    every_microbatch: bool = False  # report buckets after each micro-batch, not only the last
    synchronous: bool = True  # False: no step waits for all replicas
    shows_gradients: bool = False  # to a loop of the user's own: at parameters, on the device
    gradient_scale: float = 1.0  # of the loss; the number of replicas where weights are averaged
    batch_fraction: float = 1.0  # of the global batch, which this replica is about to compute
    next_steps: int = 0  # of the job, when the step that begins is done
    collects: bool = True  # `collect` makes the gradients of this rank those of the global batch
    traffic: StepTraffic | None = None  # where bytes are counted
    lead: int | None = None  # step b (from 0) ends when all replicas have done b - lead, or none
    updates_here: bool = True  # False: servers update, and `finish` does all of it
    # of state that is not on the device; None: the optimizer's own `load_state_dict`
    load_optimizer: Callable[[dict[str, Any]], None] | None = None
    is_alone: bool = False  # nothing is done for other replicas, before a forward neither

    def __init__(self, replica: Replica):
        self.flat = replica.flat
        self.update = replica.update
        self.group = replica.group

    def begin(self) -> None:
        """Weights are usable when this returns."""

    def reduce(self, bucket: slice) -> None:
        """The gradients of this slice are final here; backward may still run."""

    def finish(self) -> None:
        """The replica is ready for the next step; a loop of the user's own calls its parts."""
        self.collect()
        self.update.apply()
        self.flat.zero_grad()
        self.spread()

    def collect(self) -> None:
        """All buckets were reported: `p.grad` is the reduced gradient when this returns.

        Of parameters that the optimizer of this rank updates; None for the others.
        """

    def spread(self) -> None:
        """The optimizer has stepped: the other replicas get to know the weights."""

    def loss(self, local_loss: Tensor) -> Tensor:
        """The loss of the global batch, as far as known after `finish`.

        `local_loss` is this replica's: the loss of its samples times their share of the batch.
        """
        return local_loss

    def full_weights(self, optimizer: bool = False) -> AbstractContextManager[None]:
        """While the block runs, the model of each rank holds the weights to evaluate and save.

        With `optimizer`, the replica `lowest_survivor` also holds the full optimizer state.
        """
        return nullcontext()

    def evaluating(self) -> AbstractContextManager[None]:
        """While the block runs, forward passes that all ranks make alike use the right weights."""
        return self.full_weights()

    def after_load(self) -> None:
        """A checkpoint was loaded into the model and the optimizer: continue from it."""

    def state(self) -> dict[str, Tensor]:
        """What else a checkpoint has to hold, by name. All ranks call it; rank 0's is saved."""
        return {}

    def check_state(self, tensors: dict[str, Tensor]) -> None:
        """Raise CheckpointError for what `load_state` could not take; nothing is changed."""

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `state` gave, or what another strategy did; comes after `after_load`."""

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that hold state of this rank between two steps, besides `update.optimizer`."""
        return []

    def gradient_tensors(self) -> list[Tensor]:
        """Tensors that hold gradients now, besides the buffer and what is at parameters."""
        return []

    def host_tensors(self) -> list[Tensor]:
        """What this worker keeps in the host's memory instead of its device's."""
        return []

    def elsewhere(self) -> list[Tensor]:
        """Memory that this worker maps, and that counts as held by others of its host."""
        return []

    def shared_bytes(self) -> int:
        """Memory of segments that this worker shares with others, without tensors of torch."""
        return 0

    def report(self) -> dict[str, Any]:
        """What happened in this run, for machines: JSON-able."""
        return {} if self.traffic is None else self.traffic.report()

    def summary(self) -> list[str]:
        """The same in sentences, shown at the end of a run by rank 0."""
        return []

    def close(self) -> None:
        """The run is over: stop threads, close connections."""


class CountedSync(Sync):
    """Counts what this worker sends to the other replicas."""

    traffic: StepTraffic

    def __init__(self, replica: Replica):
        super().__init__(replica)
        self._replicas = replica.group
        self.traffic = StepTraffic()
        self.group = self.traffic.count(self.flat, replica.group)

    def regroup(self) -> None:
        self.group = self.traffic.count(self.flat, self._replicas)


@dataclass(frozen=True)
class Replica:
    """What a sync works on: one replica's parameters, its optimizer, and the other replicas."""

    flat: FlatParams
    update: OptimizerStep
    group: Group
    exact_microbatches: int | None = None  # the same bits at any number of replicas
    statistics: Sequence[Tensor] = ()  # of BatchNorm, where replicas keep their own
    say: Callable[[str], None] = lambda sentence: None
    copies: ReplicaShard | None = None  # where a replica is split: it knows parameters held twice
    replica_group: ReplicaGroup = field(default_factory=ReplicaGroup)  # these workers
    config: RunConfig = field(default_factory=RunConfig)
    is_whole: bool = False  # all that job.step trains; False: a part of a loop of the user's own


@dataclass(frozen=True)
class Ownership:
    """What this rank's optimizer updates, and how it learns the norm of the full gradient."""

    named: list[tuple[str, nn.Parameter]]
    grad_norm: GradNorm = field(default_factory=GradNorm)


T = TypeVar("T", bound=SyncTerm)
# of compressed gradients, which must keep their scale between steps
CHANGING_SCALE = "the scale changes between steps, and so would what is left to send"


class SyncPlan(Generic[T]):
    """What a term means at run time; registered in the file of its sync with `@runs(Ddp)`."""

    def __init__(self, term: T):
        self.term = term

    @property
    def can_be_exact(self) -> bool:
        """Whether there is a sync that adds up every gradient in full, in a fixed order."""
        return False

    def why_not_scaled(self, replicas: int) -> str | None:
        """Why gradients that are scaled (fp16) do not work under this term; None: they do."""
        if self.term.is_elastic:
            return "the gradient scaler would have to be undone after a loss"
        return None

    def check(self, exact: bool, precision: str, replicas: int) -> None:
        """Refuse options of a step that do not work under this term."""
        if precision == "fp16" and (why := self.why_not_scaled(replicas)):
            raise BadInput(
                f'{self.term} and precision="fp16" exclude each other: {why}; take precision="bf16"'
            )
        if exact and not self.can_be_exact:
            raise BadInput(
                f"exact=True adds up every gradient in full, which {self.term} does not do: "
                "take ddp"
            )

    def shards_parameters(self, replicas: int) -> bool:
        """Whether a replica holds a shard of the parameters between steps."""
        return False

    def materialize(
        self, model: nn.Module, dp: Group, device: torch.device, is_split: bool = False
    ) -> DeferredInit:
        """Bring the model to its device, filled.

        Where it is sharded that is left to `layout`; where a replica is split, to its shard.
        """
        deferred = DeferredInit(model)
        is_left_blank = bool(deferred) if is_split else self.shards_parameters(dp.size)
        if not is_left_blank:
            deferred.fill_all(model)
            model.to(device)
        return deferred

    def layout(
        self, shard: ReplicaShard, dp: Group, device: torch.device, deferred: DeferredInit
    ) -> FlatParams:
        """The parameters of this worker as a flat buffer."""
        return FlatParams(shard.named)

    def owns(self, flat: FlatParams, dp: Group, exact: bool) -> Ownership:
        """What the optimizer of this rank updates."""
        return Ownership(flat.named)

    def build(self, replica: Replica) -> Sync:
        """The sync; called once, when a step is built."""
        raise NotImplementedError


P = TypeVar("P", bound=type[SyncPlan[Any]])
_PLANS: dict[type[SyncTerm], type[SyncPlan[Any]]] = {}


def runs(kind: type[SyncTerm]) -> Callable[[P], P]:
    """Register the decorated class as the plan of a term."""

    def register(plan: P) -> P:
        _PLANS[kind] = plan
        return plan

    return register


def plan_for(term: SyncTerm, replicas: int) -> SyncPlan[Any]:
    """What `term` means at run time; its module, `sync_module`, is imported when it is used."""
    term = term.among(replicas)
    importlib.import_module(term.sync_module)
    plan = next((_PLANS[kind] for kind in type(term).__mro__ if kind in _PLANS), None)
    if plan is None:
        raise BadInput(
            f"{term.name} does not say how it runs: register its SyncPlan in the file of the term, "
            f"with @runs({type(term).__name__})"
        )
    return plan(term)


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a checkpoint whose names begin with this, without it."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
