"""A model, a strategy and options become a Step: everything is chosen here, once.

options.resolve ─▶ layout of parameters ─▶ shard ─▶ optimizer step ─▶ sync ─▶ engine
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from shoal.comm.group import Group, Op
from shoal.comm.mesh import Mesh
from shoal.embedding.module import Embedding, bind_embeddings
from shoal.errors import BadInput, NotBuilt
from shoal.observe.trace import INJECTED, Tracer
from shoal.pytree import Tree
from shoal.replica.batchnorm import (
    ForwardState,
    has_batchnorm,
    running_statistics,
    use_global_batchnorm,
    use_microbatch_norm,
)
from shoal.replica.build_shard import build_shard
from shoal.replica.deferred_init import DeferredInit
from shoal.replica.engine import EngineOptions
from shoal.replica.expert.router_losses import (
    has_router_losses,
    refuse_router_losses,
    share_router_losses,
)
from shoal.replica.flat_layout import real_view
from shoal.replica.flat_params import FlatParams
from shoal.replica.loss import BoundLoss, sum_of_samples
from shoal.replica.shard import ReplicaShard
from shoal.replica.state_dicts import tell_of_parts
from shoal.replica.tensor.summary import summary
from shoal.runtime.config import RunConfig
from shoal.runtime.faults import Faults, busy_s
from shoal.strategy.base import Batches, SyncTerm
from shoal.strategy.strategy import Strategy
from shoal.sync.base import Ownership, Replica, SyncPlan
from shoal.sync.grad_scaler import SharedGradScaler
from shoal.sync.optimizer_step import GradNorm, OptimizerFactory, OptimizerStep
from shoal.sync.optimizer_trial import Coupling, Pieces, coupling, refuse
from shoal.sync.registry import plan_for
from shoal.train.arguments import ForwardSignature
from shoal.train.cut_batch import BatchCutter
from shoal.train.known_parameters import KnownParameters
from shoal.train.model_checks import (
    check_modules,
    hooked_module,
    refuse_complex,
    refuse_sparse_adam,
)
from shoal.train.options import StepFunctions, StepOptions
from shoal.train.step import Step
from shoal.train.user_schedules import check_user_schedules

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class StepContext:
    """What a job knows about every step that it builds."""

    strategy: Strategy
    mesh: Mesh
    device: torch.device
    seed: int
    tracer: Tracer
    say: Callable[[str], None]
    faults: Faults | None = None
    config: RunConfig = field(default_factory=RunConfig)
    before_build: Sequence[Callable[[nn.Module], None]] = ()

    @property
    def has_replicas(self) -> bool:
        """Whether there are several replicas, or will be: an elastic group forms later."""
        return self.mesh.dp.size > 1 or self.strategy.is_elastic

    @property
    def is_split(self) -> bool:
        """Whether a replica is split over several workers."""
        return self.mesh.replica_group.size > 1


def build_step(
    model: nn.Module,
    functions: StepFunctions,
    options: StepOptions,
    context: StepContext,
    example: Tree = None,
) -> Step:
    """All ranks call it together. `example` are inputs of a batch, to measure the model with."""
    functions.check()
    term = context.strategy.sync_for(context.mesh.dp.size)
    prepared = prepare_model(model, term, options, context, functions.optimizer, example)
    return assemble_step(prepared, prepared.shard, functions, context)


@dataclass(frozen=True)
class PreparedModel:
    """A model on its device, split over the workers of a replica, with its checked options."""

    model: nn.Module
    term: SyncTerm
    plan: SyncPlan[Any]
    options: StepOptions
    shard: ReplicaShard
    deferred: DeferredInit
    forward: ForwardSignature
    forward_state: ForwardState
    embeddings: list[Embedding]
    shares_statistics: bool = True  # of BatchNorm: once, where several steps train one model


def prepare_model(
    model: nn.Module,
    term: SyncTerm,
    options: StepOptions,
    context: StepContext,
    optimizer: OptimizerFactory,
    example: Tree = None,
) -> PreparedModel:
    """What is done once for a model, whatever trains it. `optimizer` is that of embeddings."""
    if context.faults is not None:
        context.faults.at_start()
    is_sharded = context.has_replicas and term.with_whole_parameters() != term
    check_modules(model, context.strategy if is_sharded or context.is_split else None)
    if (
        is_sharded
        or context.is_split
        or (context.has_replicas and not term.trains_complex_parameters)
    ):
        refuse_complex(model, context.strategy)
    for change in context.before_build:
        change(model)
    mesh = context.mesh
    device = context.device
    options = options.resolve(context.strategy, mesh.dp.size, model)
    forward = ForwardSignature(model)  # before a strategy wraps it
    plan = plan_for(term)
    plan.check(options, mesh.dp.size)
    microbatches = options.local_microbatches(mesh.dp.size, mesh.dp.rank)
    check_user_schedules(context.strategy, mesh, microbatches, device)
    if options.exact:
        _make_deterministic(device)

    # the model on its device, and what it shares with other replicas while it computes
    deferred = plan.materialize(model, mesh.dp, device, context.is_split)
    embeddings = bind_embeddings(model, optimizer, context.seed)
    if embeddings:
        _check_embeddings(term, options, context)
    forward_state = _share_batchnorm(model, term, options, context)
    if mesh.pp.size > 1:
        refuse_router_losses(model)
    elif term.lockstep and has_router_losses(model):
        share_router_losses(model, [mesh.data.duplicate()], forward_state)

    # this worker's shard of the replica
    shard = build_shard(model, context.strategy, mesh, device, deferred, example, context.say)
    if shard.experts is not None:
        context.say(shard.experts.summary)
    if shard.tensor is not None:
        context.say(summary(shard.tensor))
    if shard.tensor is not None or shard.experts is not None or mesh.pp.size > 1:
        tell_of_parts(model, str(context.strategy), context.say)
    return PreparedModel(
        model, term, plan, options, shard, deferred, forward, forward_state, list(embeddings)
    )


def assemble_step(
    prepared: PreparedModel, shard: ReplicaShard, functions: StepFunctions, context: StepContext
) -> Step:
    """The step that trains the parameters of `shard`, which may be some of the model's."""
    model = prepared.model
    term = prepared.term
    plan = prepared.plan
    options = prepared.options
    embeddings = prepared.embeddings
    mesh = context.mesh
    device = context.device

    # its parameters as the strategy keeps them
    flat = plan.layout(shard, mesh.dp, device, prepared.deferred)
    if shard is prepared.shard:
        broadcast_start(model, flat.params, mesh.dp)
    if mesh.dp.size > 1 and flat.data.numel():
        mesh.dp.broadcast(flat.data).wait()

    # the optimizer step, and how replicas synchronize around it
    owned = plan.owns(flat, mesh.dp, options.exact)
    update = _optimizer_step(owned, shard, functions, options, context)
    shares_statistics = prepared.shares_statistics and not term.lockstep
    statistics = running_statistics(model) if shares_statistics else []
    sync = plan.build(_replica(shard, flat, update, statistics, options, context))
    if flat.grads.buckets:
        refuse_sparse_adam(update.optimizer, model, term)
    store = sync.row_store()
    if store is not None and embeddings:
        bind_embeddings(model, functions.optimizer, context.seed, store)
        if not store.copies_rows and any(embedding.spec.hot_share for embedding in embeddings):
            context.say(
                "hot_share has no effect where servers have replicas: the pulls of a row are "
                "spread over the replicas of its owner"
            )
        if sync.synchronous and any(embedding.spec.cache_steps for embedding in embeddings):
            context.say(
                "cache_steps has no effect: synchronous training promises the result of one "
                'device, so workers keep no rows; use ps(staleness=…), ps(mode="async") or a quorum'
            )

    # the engine that computes micro-batches
    shard.token_axes.attach(flat.grads)
    cutter = BatchCutter(
        options,
        mesh.data,
        flat.device,
        context.seed,
        prepared.forward,
        functions.count,
        sync.synchronous,
        copies=mesh.cp.size,
    )
    if cutter.cuts or context.strategy.is_elastic:
        _refuse_sum(functions)
    loss = BoundLoss(functions.loss)
    if mesh.pp.size > 1:
        loss.hooked = hooked_module(model)
    engine = shard.engine(
        loss,
        flat,
        cutter.local_microbatches,
        EngineOptions(
            precision=options.precision,
            # a stage sums gradients over micro-batches, because their backwards overlap
            every_microbatch=sync.every_microbatch and (options.exact or mesh.pp.size == 1),
            gradient_scale=sync.gradient_scale,
            loss_scale=update.scale if update.scaler is not None else None,
            forward_state=prepared.forward_state,
            tracer=context.tracer,
        ),
    )
    step = Step(
        model=model,
        options=options,
        term=term,
        mesh=mesh,
        shard=shard,
        flat=flat,
        update=update,
        sync=sync,
        engine=engine,
        compute=engine.run,
        cutter=cutter,
        embeddings=embeddings,
        parameters=KnownParameters(model),
        tracer=context.tracer,
    )
    step.compute = with_faults(engine.run, context, lambda: step.number)
    return step


def with_faults(
    compute: Callable[P, T], context: StepContext, step_number: Callable[[], int]
) -> Callable[P, T]:
    """What computes a step, with the faults around it that were asked for."""
    if context.faults is None:
        return compute
    clock = _clock_of(context.device)
    return context.faults.around(compute, step_number, clock, _sleep_of(context.tracer))


def _sleep_of(tracer: Tracer) -> Callable[[float], None]:
    """A sleep that a trace shows: it is neither computing nor idling."""

    def sleep(seconds: float) -> None:
        with tracer.span(INJECTED, "--slow"):
            time.sleep(seconds)

    return sleep


def _optimizer_step(
    owned: Ownership,
    shard: ReplicaShard,
    functions: StepFunctions,
    options: StepOptions,
    context: StepContext,
) -> OptimizerStep:
    scales = options.precision == "fp16"
    shards = None if owned.grad_norm.over_shards is None else context.mesh.dp
    update = OptimizerStep(
        owned.named,
        functions.optimizer,
        clip_norm=options.clip_norm,
        grad_norm=replace(owned.grad_norm, over_replica=shard.total_norm(shards)),
        lr=functions.lr,
        scheduler=functions.scheduler,
        scaler=_grad_scaler(owned, context) if scales else None,
        tracer=context.tracer,
    )
    functions.check_optimizer(update.optimizer)
    check_pieces(update, shard, context)
    return update


def check_pieces(update: OptimizerStep, shard: ReplicaShard, context: StepContext) -> None:
    """Refuse an optimizer that looks at more than this worker has, on all workers alike."""
    groups = _sharing_groups(update.grad_norm, context.mesh)
    is_elastic = context.strategy.is_elastic and _is_sharded(update.grad_norm)
    if not groups and not is_elastic:
        return
    found = torch.zeros((), device=context.device)
    if update.named:
        found += coupling(
            update.optimizer, Pieces(False, shard.cut_dims()), update.named, update.factory
        )
    for group in groups:
        group.all_reduce(found, Op.MAX).wait()
    refuse(Coupling(int(found)), type(update.optimizer).__name__, str(context.strategy))


def _grad_scaler(owned: Ownership, context: StepContext) -> SharedGradScaler:
    """Replicas agree where each of them updates a shard; else all have the same gradients."""
    return SharedGradScaler(context.device, _sharing_groups(owned.grad_norm, context.mesh))


def _sharing_groups(norm: GradNorm, mesh: Mesh) -> list[Group]:
    """Groups whose workers update other parameters, or other slices of them."""
    groups = [mesh.tp, mesh.pp, mesh.ep, *([mesh.dp] if _is_sharded(norm) else [])]
    return [group for group in groups if group.size > 1]


def _is_sharded(norm: GradNorm) -> bool:
    """Whether each replica updates a shard."""
    return norm.over_shards is not None or norm.params is not None


def _replica(
    shard: ReplicaShard,
    flat: FlatParams,
    update: OptimizerStep,
    statistics: Sequence[Tensor],
    options: StepOptions,
    context: StepContext,
) -> Replica:
    return Replica(
        flat=flat,
        update=update,
        group=context.mesh.dp,
        exact_microbatches=options.microbatches if options.exact else None,
        statistics=statistics,
        say=context.say,
        copies=shard if context.is_split else None,
        replica_group=context.mesh.replica_group,
        config=context.config,
    )


def _check_embeddings(term: SyncTerm, options: StepOptions, context: StepContext) -> None:
    if context.mesh.world.size > 1 and not term.has_servers:
        raise NotBuilt(
            "shoal.Embedding trains on several workers under ps, not otherwise; under hogwild "
            "use nn.Embedding(sparse=True)"
        )
    if context.is_split:
        raise NotBuilt(
            "shoal.Embedding is not built for a model that is split over workers: each "
            "would pull and push the rows of the same samples; train it whole, or use nn.Embedding"
        )
    if options.exact or options.precision == "fp16":
        raise BadInput('shoal.Embedding trains neither with exact=True nor with "fp16"')
    if options.clip_norm is not None:
        context.say(
            "clip_norm bounds the gradient of the parameters; it leaves out rows of shoal.Embedding"
        )


def _share_batchnorm(
    model: nn.Module, term: SyncTerm, options: StepOptions, context: StepContext
) -> ForwardState:
    """Make BatchNorm use the samples of all replicas, where the strategy allows it."""
    dp = context.mesh.data
    if not has_batchnorm(model) or options.batchnorm == "local":
        return ForwardState()
    is_shared = dp.size > 1 or context.strategy.is_elastic
    if is_shared and not term.lockstep:
        context.say(_local_statistics(term))
        return ForwardState()
    if context.mesh.pp.size > 1 and options.accumulate == 1 and not options.exact:
        context.say(
            "BatchNorm uses the whole batch, so the stages compute it in one micro-batch, one "
            "after the other; with pp(…, microbatches=n) they overlap, and it uses micro-batches"
        )
    if options.exact or options.accumulate > 1:
        context.say(
            "BatchNorm statistics are those of each micro-batch, not of the whole batch, "
            "because the batch is computed in several micro-batches"
        )
    if options.exact:
        return use_microbatch_norm(model)
    return use_global_batchnorm(model, dp.duplicate()) if is_shared else ForwardState()


def _local_statistics(term: SyncTerm) -> str:
    statistics = (
        "running statistics are shared like the weights"
        if term.batches is Batches.IN_TURNS
        else "the mean of the running statistics is tested and saved"
    )
    return f"BatchNorm uses each replica's own samples under {term.name}; {statistics}"


def broadcast_start(model: nn.Module, trained_params: Sequence[Tensor], dp: Group) -> None:
    """Every replica starts from what replica 0 has, besides trained parameters."""
    if dp.size == 1:
        return
    trained = {id(p) for p in trained_params}
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) not in trained and tensor.numel() and tensor.device.type != "meta":
            contiguous = tensor.detach().contiguous()
            dp.broadcast(real_view(contiguous)).wait()
            tensor.detach().copy_(contiguous)


def _clock_of(device: torch.device) -> Callable[[], float]:
    """A clock that measures computing time."""
    if device.type != "cuda":
        return busy_s

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.monotonic()

    return read


def _refuse_sum(functions: StepFunctions) -> None:
    name = sum_of_samples(functions.loss)
    if name is not None:
        raise BadInput(
            f'the loss {name} has reduction="sum", and the loss of a batch that is cut into parts '
            'is the mean over its samples: use reduction="mean", with count=… where that is a '
            "mean over tokens, and multiply the learning rate by the batch size"
        )


def _make_deterministic(device: torch.device) -> None:
    """Fix what else decides the order of additions: threads, and CUDA's choice of kernels."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
