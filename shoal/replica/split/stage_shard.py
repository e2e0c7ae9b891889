"""What one worker has of a pipelined replica: a stage, and under tp slices of its tensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.comm.mesh import Mesh
from shoal.comm.objects import Envelope, PytreeChannel, all_equal
from shoal.errors import BadInput, NotBuilt
from shoal.replica.accumulation import OrderedAccumulation, StepAccumulation
from shoal.replica.context.sequence_shard import SequenceContext
from shoal.replica.deferred_init import DeferredInit, with_values_of_rank_0
from shoal.replica.engine import Engine, EngineOptions
from shoal.replica.flat_params import FlatParams
from shoal.replica.microbatch_context import Loss, MicroBatch, preserve_modes
from shoal.replica.pipeline.balance import measured_by_rank_0
from shoal.replica.pipeline.stage_io import PipelineStage
from shoal.replica.pipeline.stages import Stages
from shoal.replica.split.attributes import Slot, kept_tensors, newly_kept
from shoal.replica.split.shard import ReplicaShard
from shoal.replica.split.stage_check import StageCheck, evaluating
from shoal.replica.split.state_dicts import state_of
from shoal.replica.tensor.parallelize import TensorSplit
from shoal.runtime.pytree import Tree
from shoal.schedules.pipelines import ActionKind
from shoal.schedules.pipelines.catalog import build, schedule
from shoal.strategy.split_terms import Pp

_TAG = (1 << 30) - 1  # tags of messages between stages are smaller


LARGEST_CHECKED_BYTES = 1 << 30
_RESULT_TAG = 2  # tags of activations and gradients end in the bits 00 and 01


class _NoGradients(TorchFunctionMode):
    """Stages have parts of a graph: a forward cannot ask for gradients of what others compute."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.autograd.grad and not torch.is_grad_enabled():
            raise BadInput(
                "pp divides the graph of a forward among its stages, and this one calls "
                "torch.autograd.grad: train it under ddp, zero or ps"
            )
        return func(*args, **(kwargs or {}))


class StageShard(ReplicaShard):
    """One stage of a pipeline; the model's other tensors are shapes without memory."""

    def __init__(
        self,
        model: nn.Module,
        pp: Pp,
        mesh: Mesh,
        device: torch.device,
        deferred: DeferredInit,
        example: Tree = None,
    ):
        self.model = model
        self.pp = pp
        self.group = self.pipeline = mesh.pp
        self.is_trusted = bool(deferred)  # with all tensors on one worker it may not fit
        self._written: list[str] = []  # buffers, by a forward
        seconds = None
        if pp.balance == "measured" and pp.cuts is None:
            seconds = measured_by_rank_0(model, example, pp, mesh.world, device, bool(deferred))
        chunks = schedule(pp.schedule).num_chunks(pp.chunks)
        self.stages = Stages(model, self.group.size, chunks, pp.cuts, seconds)
        self._check_same_cuts()
        index_of = {p: index for index, p in enumerate(model.parameters())}
        filled = with_values_of_rank_0(deferred.fill_in_turn(model, device), mesh.world)
        self.named = self.stages.keep(self.group.rank, filled)
        self.num_parameters = len(index_of)
        self.index_of = {p: index_of[p] for _, p in self.named}
        self.channel = PytreeChannel(self.group, device)
        held_by = [(p, self.stages.holders[name]) for name, p in self.named]
        self._tied = [
            (p, holders) for p, holders in held_by if p.requires_grad and len(holders) > 1
        ]
        self._counted_ids = {id(p) for p, by in held_by if by[0] == self.group.rank}

    def split_tensors(self, tensor: TensorSplit) -> None:
        self.tensor = tensor
        self.stages.split_tensors(tensor)

    def split_sequences(self, context: SequenceContext) -> None:
        if self.stages.replays:
            raise NotBuilt(
                f"pp({self.group.size}) + cp({context.group.size}) is built for models whose "
                f"forward torch.fx can trace, and that of {type(self.model).__name__} cannot be: "
                "take one of them, beside ddp, zero, tp or ep"
            )
        self.context = context
        self.stages.context = context

    def is_counted_here(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._counted_ids

    def reduce_tied_grads(self) -> None:
        """Replace the gradient of every tied weight by the sum over its holders, in their order."""
        for p, holders in self._tied:
            grads = self._exchange([p.grad], holders, _TAG)
            present = [grad for (grad,) in grads if grad is not None]
            p.grad = functools.reduce(torch.add, present) if present else None

    @property
    def compute_module(self) -> nn.Module | None:
        virtual_stages = range(self.group.rank, self.stages.virtual_stages, self.group.size)
        segments = [self.stages.segment(virtual) for virtual in virtual_stages]
        modules = [segment for segment in segments if isinstance(segment, nn.Module)]
        return nn.ModuleList(modules) if len(modules) == len(segments) else self.model

    def engine(
        self, loss: Loss, flat: FlatParams, microbatches: int, options: EngineOptions
    ) -> Engine:
        pipeline = build(self.pp.schedule, self.group.size, microbatches, self.pp.chunks)
        actions = pipeline.actions[self.group.rank]
        flat.splits_backward = any(action.kind is ActionKind.INPUT for action in actions)
        tied = {id(p) for p, _ in self._tied}
        flat.grads.tied = {i for i, p in enumerate(flat.params) if id(p) in tied}
        options = replace(options, recompute=self.pp.recompute)
        stage = PipelineStage(
            self.stages, flat, pipeline, self.channel, options.tracer, options.every_microbatch
        )
        kind = OrderedAccumulation if options.every_microbatch else StepAccumulation
        return Engine(stage, loss, flat, actions, kind(flat, self.reduce_tied_grads), options)

    def synchronize_copies(self, tensors: Mapping[nn.Parameter, Tensor]) -> None:
        for p, holders in self._tied:  # what their first holder has
            if self.group.rank == holders[0]:
                for sent in [self.channel.send([tensors[p]], s, _TAG) for s in holders[1:]]:
                    sent.wait()
            else:
                tensors[p].copy_(self.channel.recv(holders[0], _TAG)[0])
        super().synchronize_copies(tensors)

    def is_duplicate(self, parameter: nn.Parameter) -> bool:
        return not self.is_counted_here(parameter) or super().is_duplicate(parameter)

    def broadcast(self, tree: Tree) -> Tree:
        last = self.group.size - 1
        if self.group.rank != last:
            return self.channel.recv(last, _RESULT_TAG)
        for sent in [self.channel.send(tree, stage, _RESULT_TAG) for stage in range(last)]:
            sent.wait()
        return tree

    def broadcast_loss(self, loss: Tensor) -> Tensor:
        number = loss.double()
        self.group.broadcast(number, root=self.group.size - 1).wait()
        return number.to(loss.dtype)

    def gather(self, tree: Tree) -> list[Tree]:
        by_stage = self.channel.gather(super().gather(tree), 0)
        return [tree for trees in by_stage for tree in trees]

    @torch.no_grad()
    def check(self, microbatches: Sequence[MicroBatch], engine: Engine) -> None:
        """The first stage runs the whole model and compares; a large or meta one is trusted."""
        kept = self._try_forwards(microbatches, engine)
        if self.group.rank != 0:
            self.stages.hide_kept(kept, self.group.rank)
        size = sum(t.nbytes for t in state_of(self.model).values())
        if not self.is_trusted and size <= LARGEST_CHECKED_BYTES:
            StageCheck(self, engine).run(microbatches[0])
        self.stages.hide_kept(kept, self.group.rank)

    def take_whole_batches(self, engine: Engine) -> None:
        pipeline = build(self.pp.schedule, self.group.size, 1, self.pp.chunks)
        assert isinstance(engine.stage, PipelineStage)
        engine.stage.follow(pipeline)
        engine.actions = pipeline.actions[self.group.rank]
        engine.written_once = self._written

    def _try_forwards(self, microbatches: Sequence[MicroBatch], engine: Engine) -> list[list[Slot]]:
        """Find out what stages use of each other's results; before that, they send everything.

        Returns the attributes that the modules of each stage have set to tensors meanwhile.
        """
        before = kept_tensors(self.model)
        inputs = microbatches[0].inputs
        with engine.flat.full_params(), preserve_modes(self.model), _NoGradients():
            written = engine.dry_forward(inputs)
            if self.stages.replays:
                with evaluating(self.model):
                    engine.dry_forward(inputs)
        kept = newly_kept(before, self.model)
        found = self._exchange([self.stages.usage(), kept, sorted(written)])
        by_stage = [[(name, key) for name, key in slots] for _, slots, _ in found]
        self.stages.learn([one for usage, _, _ in found for one in usage], by_stage)
        if any(names for _, _, names in found):
            self._compare_written(written, microbatches, engine)
        return by_stage

    def _compare_written(
        self, written: dict[str, Tensor], microbatches: Sequence[MicroBatch], engine: Engine
    ) -> None:
        """See by other rows whether what a forward writes into buffers follows from its rows."""
        differs = sorted(written)
        if len(microbatches) > 1 and microbatches[1].real:
            with engine.flat.full_params():
                others = engine.dry_forward(microbatches[1].inputs)
            differs = [n for n, t in written.items() if n not in others or not t.equal(others[n])]
        found = self._exchange([differs])
        self.changed_by_batch = next((names[0] for (names,) in found if names), None)
        self._written = list(written)
        if self.changed_by_batch is None or len(microbatches) == 1:
            engine.written_once = self._written

    def _exchange(
        self, tree: Tree, stages: Sequence[int] | None = None, tag: int = _RESULT_TAG
    ) -> list[Tree]:
        """The trees of these stages, or of all, in their order, on each of them."""
        stages = range(self.group.size) if stages is None else stages
        others = [stage for stage in stages if stage != self.group.rank]
        sent = self.channel.exchange(
            [Envelope(stage, tag, tree) for stage in others],
            [Envelope(stage, tag) for stage in others],
        )
        trees = {stage: self.channel.recv(stage, tag) for stage in others}
        sent.wait()
        trees[self.group.rank] = tree
        return [trees[stage] for stage in stages]

    def _check_same_cuts(self) -> None:
        """All stages must have split the same model at the same points."""
        text = repr((self.stages.replays, self.stages.cuts, sorted(self.stages.holders.items())))
        if not all_equal(self.group, text.encode()):
            raise BadInput(
                f"rank {self.group.rank} and another stage have built different models: every "
                "worker has to build the same one, with the same layers"
            )
