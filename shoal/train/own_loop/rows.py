"""Rows of the global batch in a loop of the user's own, and the calls of models on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.comm.mesh import Mesh
from shoal.errors import BadInput
from shoal.replica import microbatch_context
from shoal.replica.flat_params import FlatParams
from shoal.replica.forward_buffers import ForwardBuffers, tell_of_change
from shoal.replica.microbatch_context import fork_rng, seed_generators
from shoal.replica.split.mapping import gather_rows, in_torch_func
from shoal.replica.split.shard import ReplicaShard
from shoal.runtime.pytree import map_leaves
from shoal.train.data import AnyBatch, Batch, DictBatch, batch_of
from shoal.train.data.rows import take
from shoal.train.data.sampling import BatchSplit, FullDatasetBatch, mix

if TYPE_CHECKING:
    from shoal.train.own_loop.part import LoopPart


_NARROW = (torch.float16, torch.bfloat16)


class LoopForwards:
    """Before a forward weights have to be usable; in it, random numbers are the replica's.

    The first call of a model shows what its inputs are: before it a split model is compared with
    the whole one, and nothing is trained without that. `parts` are those of the loop so far.
    """

    def __init__(self, mesh: Mesh, seed: int, device: torch.device, parts: Sequence[LoopPart]):
        self.mesh = mesh
        self.seed = seed
        self.device = device
        self._parts = parts
        self._calls = 0
        self._compared: set[nn.Module] = set()
        self._is_comparing = False  # its own calls of the model are not the script's

    def watch(self, model: nn.Module, shard: ReplicaShard) -> None:
        """From now on, all calls of `model`, where there is something to do around them.

        A hook takes time, and torch.compile ends a graph at it.
        """
        if self.mesh.world.size == 1 and all(part.sync.is_alone for part in self._parts_of(model)):
            return
        states: list[list[Tensor]] = []
        is_alone = self.mesh.data.size == 1
        first: list[ForwardBuffers | None] = []

        def before(module: nn.Module, inputs: Any, named: Any) -> Any:
            if self._is_comparing:
                return None
            if torch.is_grad_enabled():
                for part in self._parts_of(module):
                    part.begin_forward()
            self._compare_first(shard, inputs, named)
            if not is_alone:
                first.extend([] if first else [ForwardBuffers(module)])
                states.append(microbatch_context.get_generators(self.device))
                self._calls += 1
                microbatch_context.seed_generators(
                    self.device, mix(self.seed, 7, self.mesh.data.rank, self._calls)
                )

            from shoal.replica.context.sequence_shard import has_shards, shard_inputs

            if shard.context is None or has_shards((inputs, named)):
                return None
            return shard_inputs((inputs, named), shard.context)

        def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if states:
                microbatch_context.set_generators(self.device, states.pop())
            if first and first[0] is not None and not self._is_comparing:
                tell_of_change(module, first[0].may_follow_from_rows(), shard.say)
                first[0] = None

        model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        model.register_forward_hook(after, always_call=True)

    def check(self, reached: Sequence[LoopPart]) -> None:
        """Raise `BadInput` if a backward reaches a split model that the script has never called."""
        for part in reached:
            shard = part.step.shard
            if part.trains and self._is_due(shard):
                name = type(shard.model).__name__
                split = "tp" if shard.experts is None else "ep"
                size = part.step.mesh.tp.size if split == "tp" else part.step.mesh.ep.size
                raise BadInput(
                    f"{split}({size}) compares the split {name} with the whole one when "
                    "the loop calls it, and this loop has called only modules inside of it: "
                    f"call the {name} itself, or give job.setup the modules that the loop calls"
                )

    def _parts_of(self, model: nn.Module) -> list[LoopPart]:
        return [part for part in self._parts if part.step.model is model]

    def _is_due(self, shard: ReplicaShard) -> bool:
        return shard.is_compared_at_first and shard.model not in self._compared

    def _compare_first(
        self, shard: ReplicaShard, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise `BadInput` on all ranks if a model is called first, and is split wrongly.

        In the precision of the parameters: rounding of autocast would hide an error. Tensors of
        inference mode cannot be used for gradients: a later call is taken.
        """
        if not self._is_due(shard) or torch.is_inference_mode_enabled():
            return
        if in_torch_func():
            raise BadInput(
                f"the loop calls {type(shard.model).__name__} inside of torch.func (grad, vmap), "
                "and a model that is split over workers cannot be transformed by it: use "
                "torch.autograd.grad(…, create_graph=True), or take ddp, ps, zero(1) or zero(2)"
            )
        self._compared.add(shard.model)
        parts = self._parts_of(shard.model)
        device = next(shard.model.parameters()).device.type
        dtypes = (p.dtype for p in shard.model.parameters() if p.is_floating_point())
        dtype = next(dtypes, None) if torch.is_autocast_enabled(device) else None
        call = microbatch_context.ModuleCall(_input_of(args, dtype), _input_of(kwargs, dtype), 0)
        with_gradients = all(type(part.flat) is FlatParams for part in parts)
        self._is_comparing = True
        with ExitStack() as stack:
            stack.callback(setattr, self, "_is_comparing", False)
            for part in parts:
                stack.enter_context(part.flat.full_params())
            stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(parts[0].step.shard.precision() if parts else shard.precision())
            shard.compare(call, with_gradients)


def _input_of(tree: Any, dtype: torch.dtype | None) -> Any:
    """Without the graph that it comes from; narrow numbers in `dtype`, if that is given."""

    def leaf_of(tensor: Tensor) -> Tensor:
        leaf = tensor.detach()
        if dtype is not None and leaf.dtype in _NARROW:
            leaf = leaf.to(dtype)
        return leaf.requires_grad_(tensor.requires_grad)

    return map_leaves(lambda leaf: isinstance(leaf, Tensor), leaf_of, tree)


class LoopRows:
    """What is known of the batch that `job.batches` yielded last.

    The cutters of `parts` do what `shoal verify` changes: reversed samples, double precision.
    """

    def __init__(self, mesh: Mesh, seed: int, device: torch.device, parts: Sequence[LoopPart]):
        self.mesh = mesh
        self.seed = seed
        self.device = device
        self.batch: AnyBatch | None = None
        self._parts = parts
        self._number = 0  # of the batch
        self._draws = 0  # calls of `take` in it
        self._group: Group | None = None

    def begin(self, batch: AnyBatch, number: int) -> None:
        self.batch = batch
        self._number = number
        self._draws = 0

    def end(self) -> None:
        self.batch = None

    @property
    def fraction(self) -> float:
        """This worker's fraction of the global batch; equal ones without `job.batches`.

        Workers that have other positions of the same rows divide it.
        """
        copies = self.mesh.cp.size
        if self.batch is None:
            return 1 / (self.mesh.data.size * copies)
        return sum(self.batch.microbatch_sizes) / max(1, self.batch.total) / copies

    @property
    def is_placeholder(self) -> bool:
        """Whether this replica has no rows of the batch, but one that stands in for them."""
        return self.batch is not None and sum(self.batch.microbatch_sizes) == 0

    def moved(self, batch: Any) -> Any:
        """The batch on the device, in the form that it has."""
        part = self.batch
        if isinstance(batch, FullDatasetBatch) or part is None:
            return batch
        content = self._parts[0].step.cutter.place(part.content, part.rows)
        if not isinstance(batch, (Batch, DictBatch)):
            return content
        moved = batch_of(content, part.total, part.microbatch_sizes)
        moved.concurrent = part.concurrent
        return moved

    def gather(self, x: Tensor) -> Tensor:
        """See `Job.gather`."""
        data = self.mesh.data
        if self.has_whole_batch or data.size == 1:
            return x
        if self._group is None:  # with an order of operations of its own
            self._group = data.duplicate()
        rows = x[:0] if self.is_placeholder else x
        if x.dtype == torch.bool:
            return gather_rows(rows.to(torch.uint8), self._group).bool()
        return gather_rows(rows, self._group)

    def take(self, make: Callable[[int], Tensor] | Tensor) -> Tensor:
        """See `Job.rows`."""
        batch = self.batch
        if batch is None:
            raise BadInput("job.rows gives rows of a batch: call it inside a loop over job.batches")
        if isinstance(make, Tensor):
            everything = make
        else:
            self._draws += 1
            turn = self.mesh.data.rank if self.has_whole_batch else 0
            with fork_rng(self.device):
                seed_generators(self.device, mix(self.seed, 8, self._number, self._draws, turn))
                everything = make(batch.total)
        if everything.dim() == 0 or len(everything) != batch.total:
            raise BadInput(
                f"job.rows needs a row for each of the {batch.total} samples of the global batch, "
                f"not a tensor of shape {tuple(everything.shape)}"
            )
        data = self.mesh.data
        split = BatchSplit() if self.has_whole_batch else BatchSplit(data.rank, data.size)
        rows: Tensor = take(everything, split.rows(batch.total))
        if not self._parts:
            return rows.to(self.device)
        placed: Tensor = self._parts[0].step.cutter.place(rows, len(rows))
        return placed

    @property
    def has_whole_batch(self) -> bool:
        """Whether replicas take whole batches in turns."""
        return self.batch is not None and self.batch.concurrent > 1
