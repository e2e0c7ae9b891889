"""A model, a strategy and options become a Step: everything is chosen here, once.

options.resolve ─▶ layout of parameters ─▶ shard ─▶ optimizer step ─▶ sync ─▶ engine
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from shoal.comm.group import Group, Op
from shoal.comm.mesh import Mesh
from shoal.errors import BadInput
from shoal.replica.batchnorm import running_statistics
from shoal.replica.compiled import Compiler, uncompiled
from shoal.replica.engine import EngineOptions
from shoal.replica.flat_params import real_view
from shoal.replica.loss import BoundLoss, sum_of_samples
from shoal.replica.optimizers import LooksAt, looks_at, refuse
from shoal.replica.split.shard import ReplicaShard
from shoal.runtime.pytree import Tree
from shoal.sync import Ownership, Replica, Sync, plan_for
from shoal.sync.optimizer_step import GradNorm, OptimizerFactory, OptimizerStep, SharedGradScaler
from shoal.train.step.cut_batch import BatchCutter
from shoal.train.step.options import StepFunctions, StepOptions
from shoal.train.step.prepare_model import PreparedModel, prepare_model
from shoal.train.step.run_services import StepContext
from shoal.train.step.step import Step


def build_optimizer(
    owned: Ownership,
    shard: ReplicaShard,
    functions: StepFunctions,
    options: StepOptions,
    context: StepContext,
) -> OptimizerStep:
    skips = options.on_nan == "skip" and options.precision != "fp16"
    scales = options.precision == "fp16" or skips
    shards = None if owned.grad_norm.over_shards is None else context.mesh.dp
    # replicas agree where each of them updates a shard; else all have the same gradients
    sharing = _sharing_groups(owned.grad_norm, context.mesh)
    update = OptimizerStep(
        owned.named,
        functions.optimizer,
        clip_norm=options.clip_norm,
        grad_norm=replace(owned.grad_norm, over_replica=shard.total_norm(shards)),
        lr=functions.lr,
        scheduler=functions.scheduler,
        scaler=SharedGradScaler(context.device, sharing, skips) if scales else None,
        fuses=not options.exact,
    )
    update.tracer = context.services.tracer
    check_pieces(update, shard, context)
    return update


def check_pieces(update: OptimizerStep, shard: ReplicaShard, context: StepContext) -> None:
    """Refuse an optimizer that looks at more than this worker has, on all workers alike."""
    groups = _sharing_groups(update.grad_norm, context.mesh)
    is_elastic = context.strategy.is_elastic and _is_sharded(update.grad_norm)
    if not groups and not is_elastic:
        return
    found = torch.zeros((), device=context.device)
    looks = looks_at(update.optimizer) if update.named else LooksAt.ELEMENT
    name = type(update.optimizer).__name__
    if looks is None:
        looks = LooksAt.PARAMETER
        context.say(
            f"{name} is not known: under {context.strategy} it updates each parameter alone; if "
            f'one update looks at several parameters, set {name}.looks_at = "model"'
        )
    if looks is LooksAt.MODEL or shard.cut_dims():  # whole parameters are enough for others
        found += looks
    for group in groups:
        group.all_reduce(found, Op.MAX).wait()
    refuse(LooksAt(int(found)), name, str(context.strategy))


def _sharing_groups(norm: GradNorm, mesh: Mesh) -> list[Group]:
    """Groups whose workers update other parameters, or other slices of them."""
    groups = [mesh.tp, mesh.pp, mesh.ep, *([mesh.dp] if _is_sharded(norm) else [])]
    return [group for group in groups if group.size > 1]


def _is_sharded(norm: GradNorm) -> bool:
    """Whether each replica updates a shard."""
    return norm.over_shards is not None or norm.params is not None


def build_step(
    model: nn.Module,
    functions: StepFunctions,
    options: StepOptions,
    context: StepContext,
    example: Tree = None,
) -> Step:
    """All ranks call it together. `example` are inputs of a batch, to measure the model with."""
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"job.step(model, loss, …): the model comes first, and this is a {type(model).__name__}"
        )
    functions.check()
    model, given = uncompiled(model)
    compiler = _compiler_of(options, given, context)
    term = context.strategy.sync_for(context.mesh.dp.size)
    prepared = prepare_model(model, term, options, context, functions.optimizer, example)
    step = assemble_step(prepared, prepared.shard, functions, context)
    step.compiler = compiler
    return step


def _compiler_of(
    options: StepOptions, given: Compiler | None, context: StepContext
) -> Compiler | None:
    """By `compile`, or what the script has compiled the model with; None where torch cannot."""
    strategy = context.strategy
    compiler = Compiler.of(options.compile, options.exact, context.device) or given
    if compiler is None:
        return None
    if options.exact and not options.compile:
        raise BadInput(
            "exact=True compiles every shape by itself: give job.step the model as it is, and "
            "compile=True, in place of torch.compile(model)"
        )
    term = strategy.sync_for(context.mesh.dp.size)
    gathers = plan_for(term, context.mesh.dp.size).shards_parameters(context.mesh.dp.size)
    if options.exact and (gathers or context.mesh.pp.size > 1):
        raise BadInput(
            f"exact=True has the bits of one worker, and {strategy} compiles parts of the model, "
            "which may round where the whole does not: omit compile, or take ddp or zero(2)"
        )
    if gathers and compiler.uses_graphs:
        raise BadInput(
            "this mode of compile replays CUDA graphs, in which every tensor keeps its address, "
            f"and {term} gathers parameters into new memory: take compile=True, or zero(2)"
        )
    several = options.with_pipeline(strategy.pp).accumulate > 1 or options.exact
    if several and compiler.uses_graphs:
        raise BadInput(
            "this mode of compile replays CUDA graphs, and the next micro-batch overwrites "
            "gradients in their memory: take compile=True, or accumulate=1 without pp"
        )
    tp = strategy.tp if strategy.tp is not None and strategy.tp.sequence else None
    mesh = context.mesh
    for split, group in ((tp, mesh.tp), (strategy.ep, mesh.ep), (strategy.cp, mesh.cp)):
        if split is not None and group.size > 1:
            context.say(
                f"compile has no effect under {split}: torch.compile does not trace tensors of "
                "which each worker has some positions, or tokens that go to other workers"
            )
            return None
    return compiler


def assemble_step(
    prepared: PreparedModel, shard: ReplicaShard, functions: StepFunctions, context: StepContext
) -> Step:
    """The step that trains the parameters of `shard`, which may be some of the model's."""
    model = prepared.model
    plan = prepared.plan
    options = prepared.options
    mesh = context.mesh

    # its parameters as the strategy keeps them
    flat = plan.layout(shard, mesh.dp, context.device, prepared.deferred)
    if shard is prepared.shard:
        broadcast_start(model, flat.params, mesh.dp)
    if mesh.dp.size > 1 and flat.data.numel():
        mesh.dp.broadcast(flat.data).wait()

    # the optimizer step, and how replicas synchronize around it
    owned = plan.owns(flat, mesh.dp, options.exact)
    update = build_optimizer(owned, shard, functions, options, context)
    shares_statistics = prepared.shares_statistics and not prepared.term.lockstep
    statistics = running_statistics(model) if shares_statistics else []
    sync = plan.build(
        Replica(
            flat,
            update,
            mesh.dp,
            exact_microbatches=options.microbatches if options.exact else None,
            statistics=statistics,
            say=context.say,
            copies=shard if context.is_split else None,
            replica_group=mesh.replica_group,
            config=context.services.config,
            is_whole=shard is prepared.shard,
        )
    )
    if prepared.embeddings:
        _store_rows(prepared, sync, functions.optimizer, context)

    # the engine that computes micro-batches
    shard.token_axes.attach(flat.grads)
    cutter = BatchCutter(
        options,
        mesh,
        flat.device,
        context.seed,
        prepared.forward,
        functions.count,
        sync.synchronous,
    )
    if cutter.cuts or context.strategy.is_elastic:
        _refuse_sum(functions)
    loss = BoundLoss(functions.loss)
    if mesh.pp.size > 1:  # a loss may use what a forward hook stores
        hooked = (name for name, module in model.named_modules() if module._forward_hooks)
        loss.hooked = next(hooked, None)
    of_engine = _engine_options(prepared, update, sync, context)
    engine = shard.engine(loss, flat, cutter.local_microbatches, of_engine)
    tracer = context.services.tracer
    step = Step(prepared, shard, mesh, flat, update, sync, engine, cutter, tracer)
    step.compute = context.with_faults(engine.run, lambda: step.number)
    return step


def _engine_options(
    prepared: PreparedModel, update: OptimizerStep, sync: Sync, context: StepContext
) -> EngineOptions:
    options = prepared.options
    return EngineOptions(
        precision=options.precision,
        # a stage sums gradients over micro-batches, because their backwards overlap
        every_microbatch=sync.every_microbatch and (options.exact or context.mesh.pp.size == 1),
        gradient_scale=sync.gradient_scale,
        loss_scale=update.scale if update.scaler is not None else None,
        forward_state=prepared.forward_state,
        tracer=context.services.tracer,
    )


def _store_rows(
    prepared: PreparedModel, sync: Sync, optimizer: OptimizerFactory, context: StepContext
) -> None:
    """Rows of embeddings lie on the servers, where there are some."""
    store = sync.row_store()
    if store is None:
        return
    from shoal.server.embedding.module import bind_embeddings

    bind_embeddings(prepared.model, optimizer, context.seed, store)
    specs = [embedding.spec for embedding in prepared.embeddings]
    if not store.rules.may_copy and any(spec.hot_share for spec in specs):
        context.say(
            "hot_share has no effect where servers have replicas: the pulls of a row are "
            "spread over the replicas of its owner"
        )
    if sync.synchronous and any(spec.cache_steps for spec in specs):
        context.say(
            "cache_steps has no effect: synchronous training promises the result of one "
            'device, so workers keep no rows; use ps(staleness=…), ps(mode="async") or a quorum'
        )


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


def _refuse_sum(functions: StepFunctions) -> None:
    name = sum_of_samples(functions.loss)
    if name is not None:
        raise BadInput(
            f'the loss {name} has reduction="sum", and the loss of a batch that is cut into parts '
            'is the mean over its samples: use reduction="mean", with count=… where that is a '
            "mean over tokens, and multiply the learning rate by the batch size"
        )
