"""A model on its device, split over the workers of a replica: once, whatever trains it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shoal.comm.group import Group
from shoal.comm.mesh import Mesh
from shoal.comm.objects import all_equal
from shoal.errors import BadInput, NotBuilt
from shoal.replica.batchnorm import (
    ForwardState,
    has_batchnorm,
    use_global_batchnorm,
    use_microbatch_norm,
)
from shoal.replica.compiled import is_optimized
from shoal.replica.deferred_init import DeferredInit
from shoal.replica.expert import router_losses
from shoal.replica.split.build_shard import build_shard
from shoal.replica.split.shard import ReplicaShard
from shoal.replica.split.state_dicts import tell_of_parts
from shoal.runtime.pytree import Tree
from shoal.schedules.user import digest, is_user_function
from shoal.strategy.base import Batches, SyncTerm
from shoal.strategy.strategy import Strategy
from shoal.sync import SyncPlan, plan_for
from shoal.sync.optimizer_step import OptimizerFactory, make_optimizer
from shoal.train.same_rules import check_same_optimizers
from shoal.train.step.cut_batch import ForwardSignature
from shoal.train.step.options import StepOptions
from shoal.train.step.run_services import StepContext

if TYPE_CHECKING:
    from shoal.server.embedding.module import Embedding

_COMPARED = 1023  # lines that describe a model, each by itself; the others as one


def check_modules(model: nn.Module, term: SyncTerm, context: StepContext) -> None:
    """Refuse what the strategy cannot train, where it replaces layers or parameters."""
    strategy = context.strategy
    is_sharded = plan_for(term, context.mesh.dp.size).shards_parameters(context.mesh.dp.size)
    is_changed = is_sharded or context.is_split
    for name, module in model.named_modules():
        name = name or "the model"
        if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters(recurse=False)):
            raise BadInput(
                f"{name} is a {type(module).__name__} whose shape is not known yet: call the model "
                "once on an example, before it is trained"
            )
        # these call the layers and parameters as they were
        is_script = isinstance(module, torch.jit.ScriptModule)
        is_compiled = is_optimized(module) or module._compiled_call_impl is not None
        if is_changed and (is_script or is_compiled):
            tool = "torch.jit" if is_script else "torch.compile"
            hint = "" if is_script else ", take job.step(…, compile=True)"
            raise BadInput(
                f"{name} is compiled by {tool}, and {strategy} changes layers or parameters of a "
                f"model: leave {tool} out{hint}, or take ddp, ps or zero(2)"
            )
    takes_complex = term.trains_complex_parameters or not context.has_replicas
    for name, p in model.named_parameters():
        if p.is_complex() and (is_changed or not takes_complex):
            raise BadInput(
                f"{name} is {p.dtype}, and {strategy} does not train complex parameters: take "
                "ddp, zero(1) or zero(2), or keep it as pairs of real numbers and use "
                "torch.view_as_complex in forward"
            )


def check_same_model(model: nn.Module, world: Group, device: torch.device) -> None:
    """Refuse a model whose layers or tensors have other names, types or shapes than rank 0's.

    One broadcast; where rank 0 is lost before it, the lowest rank that is left stands for it.
    """
    if world.size == 1:
        return
    lines = [f"{n or 'the model'} ({type(m).__name__})" for n, m in model.named_modules()]
    lines += [
        f"{name} {list(t.shape)} {t.dtype}{'' if t.requires_grad else ', not trained'}"
        for name, t in [*model.named_parameters(), *model.named_buffers()]
    ]
    compared = [*lines[:_COMPARED], "\n".join(lines[_COMPARED:])]
    digests = [hashlib.sha256(line.encode()).digest()[:7] for line in compared]
    own = torch.zeros(_COMPARED + 1, dtype=torch.int64, device=device)
    own[: len(digests)] = torch.tensor([int.from_bytes(digest, "big") for digest in digests])
    first = own.clone()
    world.broadcast(first).wait()
    if not torch.equal(own, first):
        index = int((own != first).nonzero()[0])
        what = [*lines, "nothing more"][min(index, len(lines))]
        raise BadInput(
            f"rank {world.rank} has built another model than rank 0, which does not have {what} "
            "there: every rank builds the same one, so let no layer and no size depend on the rank "
            "or on data that differs between ranks"
        )


class _Registrations:
    """Counts the parameters and modules that any module of this process was given."""

    def __init__(self) -> None:
        self.count = 0
        register_module_parameter_registration_hook(self._note)
        register_module_module_registration_hook(self._note)

    def _note(self, module: nn.Module, name: str, value: Any) -> None:
        self.count += 1


_registrations = _Registrations()


class KnownParameters:
    """`check` is cheap, so that every step can call it: it looks after a registration only."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.remember()

    def check(self) -> None:
        """Raise `BadInput` if a parameter to train was added or replaced."""
        if self._registered == _registrations.count:
            return
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                raise BadInput(
                    f"{name} was added to {type(self._model).__name__}, or replaced, after "
                    "job.step or job.setup was called, and would not be trained: change the model "
                    "before that; new values of a parameter are copied into it, under "
                    "torch.no_grad()"
                )
        self.remember()

    def remember(self) -> None:
        """What the model holds now; the objects are kept, so that no other gets their id."""
        self._registered = _registrations.count
        self._known = {id(p): p for p in self._model.parameters()}


def check_user_schedules(strategy: Strategy, mesh: Mesh, microbatches: int) -> None:
    """Load and prove the schedules that `strategy` names as FILE.py:FUNCTION.

    All ranks call it. A schedule that the proof rejects, or that differs between ranks, is a
    `BadInput`.
    """
    algorithm = strategy.sync_for(mesh.dp.size).collective_algorithm
    if mesh.dp.size > 1 and algorithm is not None and is_user_function(algorithm):
        from shoal.schedules.collectives.catalog import proven_collective

        collective = proven_collective(algorithm, "all_reduce", mesh.dp.size)
        check_same(mesh.world, algorithm, digest(collective))
    pp = strategy.pp
    if pp is not None and pp.size > 1 and is_user_function(pp.schedule):
        from shoal.schedules.pipelines.catalog import proven_pipeline

        pipeline = proven_pipeline(pp.schedule, pp.size, microbatches, pp.chunks)
        check_same(mesh.world, pp.schedule, digest(pipeline))


def check_same(world: Group, name: str, schedule_digest: bytes) -> None:
    """Compare the digests of all ranks."""
    if not all_equal(world, schedule_digest):
        raise BadInput(
            f"{name} is not the same schedule on all ranks: give every worker the same file, with "
            "a function that depends on its arguments only"
        )


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
    optimizer: OptimizerFactory | None = None,
    example: Tree = None,
) -> PreparedModel:
    """What is done once for a model, whatever trains it. `optimizer` is that of job.step."""
    if context.services.faults is not None:
        context.services.faults.kill(0)
    check_modules(model, term, context)
    for change in context.before_build:
        change(model)
    mesh = context.mesh
    device = context.device
    check_same_model(model, mesh.world, device)
    options = options.resolve(context.strategy, mesh.dp.size, model)
    forward = ForwardSignature(model)  # before a strategy wraps it
    plan = plan_for(term, mesh.dp.size)
    plan.check(options.exact, options.precision, mesh.dp.size)
    if options.on_nan == "skip" and (why := plan.why_not_scaled(mesh.dp.size)):
        raise BadInput(f'{term} takes on_nan="stop" or "go on": {why}')
    microbatches = options.local_microbatches(mesh.dp.size, mesh.dp.rank)
    check_user_schedules(context.strategy, mesh, microbatches)
    if options.exact:
        _make_deterministic(device)

    # the model on its device, and what it shares with other replicas while it computes
    deferred = plan.materialize(model, mesh.dp, device, context.is_split)
    embeddings: list[Embedding] = []
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if optimizer is not None and trained and term.lockstep and not context.strategy.is_elastic:
        check_same_optimizers(mesh.world, [make_optimizer(optimizer, trained)])
    if any(getattr(module, "has_rows", False) for module in model.modules()):
        from shoal.server.embedding.module import bind_embeddings

        embeddings = bind_embeddings(model, optimizer, context.seed)
        _check_embeddings(term, options, context)
    forward_state = _share_batchnorm(model, term, options, context)
    if mesh.pp.size > 1:
        router_losses.refuse_router_losses(model)
    elif term.lockstep and router_losses.has_router_losses(model):
        router_losses.share_router_losses(model, mesh.data.duplicate(), forward_state)

    # this worker's shard of the replica
    shard = build_shard(model, context.strategy, mesh, device, deferred, example, context.say)
    if shard.experts is not None:
        context.say(shard.experts.summary)
    if shard.tensor is not None:
        from shoal.replica.tensor.parallelize import summary

        context.say(summary(shard.tensor))
    if shard.tensor is not None or shard.experts is not None or mesh.pp.size > 1:
        tell_of_parts(model, str(context.strategy), context.say)
    return PreparedModel(
        model, term, plan, options, shard, deferred, forward, forward_state, embeddings
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
        statistics = (
            "running statistics are shared like the weights"
            if term.batches is Batches.IN_TURNS
            else "the mean of the running statistics is tested and saved"
        )
        context.say(f"BatchNorm uses each replica's own samples under {term.name}; {statistics}")
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


def _make_deterministic(device: torch.device) -> None:
    """Fix what else decides the order of additions: threads, and CUDA's choice of kernels."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
