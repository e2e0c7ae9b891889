"""A model, a strategy and options become a Step: everything is chosen here, once.

options.resolve ─▶ layout of parameters ─▶ shard ─▶ optimizer step ─▶ sync ─▶ engine
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.pytree import Tree
from shoal.replica.batchnorm import running_statistics
from shoal.replica.engine import EngineOptions
from shoal.replica.flat_layout import real_view
from shoal.replica.flat_params import FlatParams
from shoal.replica.loss import BoundLoss, sum_of_samples
from shoal.replica.shard import ReplicaShard
from shoal.sync.base import Replica
from shoal.sync.optimizer_step import OptimizerStep
from shoal.train.build_optimizer import build_optimizer
from shoal.train.cut_batch import BatchCutter
from shoal.train.injected_faults import with_faults
from shoal.train.known_parameters import KnownParameters
from shoal.train.model_checks import hooked_module, refuse_sparse_adam
from shoal.train.options import StepFunctions, StepOptions
from shoal.train.prepare_model import PreparedModel, prepare_model
from shoal.train.step import Step
from shoal.train.step_context import StepContext


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
    update = build_optimizer(owned, shard, functions, options, context)
    shares_statistics = prepared.shares_statistics and not term.lockstep
    statistics = running_statistics(model) if shares_statistics else []
    sync = plan.build(_replica(shard, flat, update, statistics, options, context))
    if flat.grads.buckets:
        refuse_sparse_adam(update.optimizer, model, term)
    store = sync.row_store()
    if store is not None and embeddings:
        from shoal.embedding.module import bind_embeddings

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
