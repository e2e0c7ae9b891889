"""What one worker has of a replica: the full model, or slices of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.replica.accumulation import StepAccumulation
from shoal.replica.engine import Engine, EngineOptions, Stage
from shoal.replica.flat_params import FlatParams
from shoal.replica.grad_buckets import GradBuckets
from shoal.replica.microbatch_context import Loss, MicroBatch, ModuleCall, call_arguments
from shoal.replica.split.mapping import SlicedTensors, apply_flat
from shoal.runtime.pytree import Tree
from shoal.schedules.pipelines import accumulate

if TYPE_CHECKING:
    from shoal.replica.context.sequence_shard import SequenceContext
    from shoal.replica.expert.split import ExpertSplit
    from shoal.replica.tensor.parallelize import TensorSplit


@dataclass(frozen=True)
class TokenAxis:
    """`is_slice` says of which parameters each rank has another part; all others are copies."""

    group: Group
    is_slice: Callable[[nn.Parameter], bool] = lambda parameter: False
    has_slices: bool = False


class TokenAxes:
    """The axes of a replica along which workers hold the same parameters and have other tokens.

        cp    the same rows, other positions of each sequence
        ep    other rows; experts are slices, every other parameter is a copy

    A loss is weighted so that its sum over both axes is that of the replica's rows. So a gradient
    is that of one device after it was summed over both axes, before replicas synchronize.
    """

    def __init__(self, *axes: TokenAxis):
        self.axes = [axis for axis in axes if axis.group.size > 1]

    def __bool__(self) -> bool:
        return bool(self.axes)

    def attach(self, grads: GradBuckets) -> None:
        """Sum gradients before replicas synchronize them."""
        # where workers hold slices their buckets may differ, and tokens that travel in backward
        # depend on the batch: so gradients are then summed behind it, parameter by parameter
        if any(axis.has_slices for axis in self.axes):
            grads.before_flush = self._sum_at_parameters
        elif self.axes:
            grads.sum_gradients = self.sum_gradients

    def _sum_at_parameters(self, params: Sequence[nn.Parameter], loss: Tensor) -> None:
        self.sum_parameter_gradients(params)
        loss.copy_(self.sum(loss[0]))

    def sum(self, number: Tensor) -> Tensor:
        """The sum of a number over all workers that have other tokens of the replica's rows."""
        if not self.axes:
            return number
        total = number.detach().clone().view(1)
        for axis in self.axes:
            axis.group.all_reduce(total).wait()
        return total.view(())

    def sum_gradients(self, grads: Mapping[nn.Parameter, Tensor], header: Tensor | None) -> None:
        """Sum gradients in place; `header` has numbers that are summed along with them."""
        for axis in self.axes:
            tensors = [grad for p, grad in grads.items() if not axis.is_slice(p)]
            _sum_in_place([*tensors, *([] if header is None else [header])], axis.group)

    def sum_parameter_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Sum what backward has put at the parameters; what has none on any rank keeps None."""
        for axis in self.axes:
            copies = [p for p in params if not axis.is_slice(p)]
            has_grad = torch.tensor([float(p.grad is not None) for p in copies])
            arrived = has_grad.to(copies[0].device) if copies else has_grad
            axis.group.all_reduce(arrived).wait()
            grads = []
            for p, count in zip(copies, arrived.tolist(), strict=True):
                if count:
                    grad = torch.zeros_like(p) if p.grad is None else p.grad
                    p.grad = grad.to_dense() if grad.is_sparse else grad
                    grads.append(p.grad)
            _sum_in_place(grads, axis.group)

    def synchronize_copies(self, tensors: Mapping[nn.Parameter, Tensor]) -> None:
        """Replace what belongs to a copy by what the first rank has."""
        for axis in self.axes:
            copies = [tensor for p, tensor in tensors.items() if not axis.is_slice(p)]
            apply_flat(copies, axis.group.broadcast)

    def is_duplicate(self, parameter: nn.Parameter) -> bool:
        """Whether the first rank of an axis holds it, too."""
        return any(axis.group.rank > 0 and not axis.is_slice(parameter) for axis in self.axes)


def _sum_in_place(tensors: Sequence[Tensor], group: Group) -> None:
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        apply_flat(alike, group.all_reduce)


class ReplicaGradNorm:
    """The norm of every tensor, at its index in the whole model, then the norm of these.

    That is how torch computes the norm of a whole model, so the bits are the same. A tensor that
    several stages hold counts on one of them. It costs an all-reduce of one number per parameter
    over the replicas, where each has a shard; over tp and ep, where the squares of the slices of
    a tensor are added up; and over the stages.
    """

    def __init__(self, shard: ReplicaShard, dp: Group | None):
        """`dp` are the replicas, where each of them has a shard of the gradient, too."""
        self._shard = shard
        self._dp = dp

    @torch.no_grad()
    def __call__(self, params: Sequence[nn.Parameter]) -> Tensor:
        """The total norm; `params` are those of this worker."""
        grads = {p: p.grad for p in params if p.grad is not None}
        grads = {p: grad for p, grad in grads.items() if self._shard.is_counted_here(p)}
        norms = torch._foreach_norm(list(grads.values())) if grads else []
        return self.of(dict(zip(grads, norms, strict=True)))

    @torch.no_grad()
    def of(self, norm_of: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """The total norm from the norm of each gradient of this worker."""
        shard = self._shard
        counted = [p for p in norm_of if shard.is_counted_here(p)]
        norms = next(iter(shard.index_of)).detach().new_zeros(shard.num_parameters)
        if counted:
            indices = torch.tensor([shard.index_of[p] for p in counted], device=norms.device)
            norms[indices] = torch.stack([norm_of[p] for p in counted]).to(norms)
        if self._dp is not None:
            self._dp.all_reduce(norms).wait()
        tensor = shard.tensor
        experts = shard.experts
        if tensor is not None:
            here = [(p, i) for p, i in shard.index_of.items() if shard.is_counted_here(p)]
            norms = _combine(norms, [i for p, i in here if tensor.is_slice(p)], tensor.group)
        if experts is not None:
            norms = _combine(norms, experts.slice_indices, experts.group)
        if shard.pipeline is not None:
            shard.pipeline.all_reduce(norms).wait()
        total: Tensor = torch.linalg.vector_norm(norms)
        return total


def _combine(norms: Tensor, indices: Sequence[int], group: Group) -> Tensor:
    """The norms of tensors that are spread over a group, from those of their slices."""
    is_slice = torch.zeros_like(norms, dtype=torch.bool)
    is_slice[indices] = True
    squares = norms.square().where(is_slice, 0)
    group.all_reduce(squares).wait()
    return squares.sqrt().where(is_slice, norms)


class ReplicaShard:
    """All layers are here. Under tp, this worker has slices of their parameters; under ep, some
    experts.
    """

    tensor: TensorSplit | None = None
    experts: ExpertSplit | None = None
    pipeline: Group | None = None  # the stages
    context: SequenceContext | None = None  # where workers have other positions of sequences
    token_axes: TokenAxes = TokenAxes()  # where workers have other tokens
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext  # that `check` computes in
    say: Callable[[str], None] = staticmethod(lambda sentence: None)
    changed_by_batch: str | None = None  # a buffer that a forward changes by its rows

    def __init__(self, model: nn.Module):
        self.model = model
        self.is_trusted = False  # to compute what the model does
        self.named = list(model.named_parameters())
        self.num_parameters = len(self.named)
        # of the parameters that are here, their places in the whole model
        self.index_of = {p: index for index, (_, p) in enumerate(self.named)}

    @property
    def compute_module(self) -> nn.Module | None:
        """What computes here, where that is not the model itself."""
        return None

    def engine(
        self, loss: Loss, flat: FlatParams, microbatches: int, options: EngineOptions
    ) -> Engine:
        stage = Stage(self.model, flat.device)
        if self.context is not None:
            from shoal.replica.context.sequence_shard import ContextStage

            stage = ContextStage(self.model, flat.device, self.context)
        accumulation = StepAccumulation(flat, every_microbatch=options.every_microbatch)
        return Engine(stage, loss, flat, accumulate(microbatches), accumulation, options)

    def split_tensors(self, tensor: TensorSplit) -> None:
        self.tensor = tensor

    def split_sequences(self, context: SequenceContext) -> None:
        self.context = context

    def split_experts(self, experts: ExpertSplit) -> None:
        self.experts = experts
        self.named = experts.held(self.named)
        self.index_of = {p: self.index_of[p] for _, p in self.named}

    def total_norm(self, dp: Group | None) -> ReplicaGradNorm | None:
        """Computes the norm of the full gradient, where this worker has a shard of it."""
        is_whole = self.tensor is None and self.pipeline is None and not self.token_axes
        return None if is_whole else ReplicaGradNorm(self, dp)

    def is_counted_here(self, parameter: nn.Parameter) -> bool:
        """True on one of the stages that hold it: what is a sum over all of them counts it once."""
        return True

    def cut_dims(self) -> dict[nn.Parameter, int]:
        """The parameters of which this worker has a slice, and along which dimension."""
        specs = {name: spec for split in self._splits for name, spec in split.specs.items()}
        return {p: specs[name].dim for name, p in self.named if name in specs}

    @property
    def _splits(self) -> list[SlicedTensors]:
        return [split for split in (self.experts, self.tensor) if split is not None]

    def gather_full(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Full tensors, by name, from the slices of the ranks of tp and ep, which all call it."""
        for split in self._splits:
            tensors = split.gather_full(tensors)
        return tensors

    def take_shard(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """This worker's slices of full tensors."""
        for split in self._splits:
            tensors = split.take_shard(tensors)
        return tensors

    def synchronize_copies(self, tensors: Mapping[nn.Parameter, Tensor]) -> None:
        """Make equal what several workers of the replica have of the same parameter.

        Where gradients are compressed, what arrives also depends on the neighbours in a bucket.
        """
        self._axes_with_copies.synchronize_copies(tensors)

    def is_duplicate(self, parameter: nn.Parameter) -> bool:
        """Whether `synchronize_copies` replaces what is here by what another worker has."""
        return self._axes_with_copies.is_duplicate(parameter)

    @property
    def _axes_with_copies(self) -> TokenAxes:
        """Ranks of tp have the same tokens, and copies of what is not split."""
        tensor = self.tensor
        extra = [] if tensor is None else [TokenAxis(tensor.group, tensor.is_slice)]
        return TokenAxes(*self.token_axes.axes, *extra)

    def broadcast(self, tree: Tree) -> Tree:
        """The last stage's value, on all stages: a tree of tensors and plain values."""
        return tree

    def broadcast_loss(self, loss: Tensor) -> Tensor:
        """The last stage's loss, on all stages."""
        return loss

    def gather(self, tree: Tree) -> list[Tree]:
        """The trees of all stages and of workers with other experts, on the first of them.

        The others get their own.
        """
        return [tree] if self.experts is None else self.experts.gather(tree)

    def check(self, microbatches: Sequence[MicroBatch], engine: Engine) -> None:
        """Raise `BadInput` unless the shards together compute what the model does."""
        if self.is_compared_at_first:
            micro = microbatches[0]
            with engine.flat.full_params(), self.precision():
                args, kwargs = call_arguments(micro.inputs)
                self.compare(ModuleCall(args, kwargs, micro.seed), type(engine.flat) is FlatParams)

    def take_whole_batches(self, engine: Engine) -> None:
        """From now on in one micro-batch."""
        engine.actions = accumulate(1)

    @property
    def is_compared_at_first(self) -> bool:
        """Whether the first call shows that the shards compute what the model does."""
        is_split = self.tensor is not None and bool(self.tensor.roles)
        if self.is_trusted:
            return False
        return is_split or (self.experts is not None and not self.experts.drops)

    def compare(self, call: ModuleCall, with_gradients: bool) -> None:
        """`check` for arguments of the model's forward; all parameters are here."""
        from shoal.replica.split.split_check import SplitModel, check_split

        check_split(SplitModel(self.tensor, self.experts, with_gradients, self.say), call)
