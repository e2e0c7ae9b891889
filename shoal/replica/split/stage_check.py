"""Before the first step: the stages of a pipeline together compute what the model does.

The first stage gets the tensors of all stages and runs the whole model on the first micro-batch.
Outputs are compared in evaluation mode. Gradients are compared in training, but for layers, which
evaluate (BatchNorm keeps its statistics, dropout does nothing), with the same random numbers; where
outputs differ even so, such as by numbers that numpy draws, in evaluation mode.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from shoal.comm.group import Op
from shoal.errors import BadInput
from shoal.replica.accumulation import OrderedAccumulation
from shoal.replica.deferred_init import tensor_slots
from shoal.replica.engine import Engine, EngineOptions
from shoal.replica.flat_params import FlatParams
from shoal.replica.microbatch_context import (
    MicroBatch,
    Quiet,
    call_arguments,
    evaluate_leaves,
    fork_rng,
    preserve_modes,
    seed_forward,
)
from shoal.replica.pipeline.stage_io import PipelineStage
from shoal.replica.split.comparison import Computed, gradients_of, is_same, noise_of, score_of
from shoal.replica.split.sharded_tensor import full_activations
from shoal.runtime.pytree import Tree, map_tensors, tensors_of
from shoal.schedules.pipelines import Action, ActionKind, Pipeline

if TYPE_CHECKING:
    from shoal.replica.split.stage_shard import StageShard

_ROWS = 2  # of the micro-batch: they are enough to see a gradient, and need little memory
_SAME = -1.0  # what is sent instead of the number of a parameter
_OTHER_OUTPUTS = -2.0


class _KeptGradients(OrderedAccumulation):
    """Those of one micro-batch: nothing is reduced."""

    def finish(self) -> Tensor:
        return torch.zeros((), device=self.flat.device)


class StageCheck:
    """Compares the stages with the model; raises `BadInput` on all of them."""

    def __init__(self, shard: StageShard, engine: Engine):
        self._shard = shard
        self._group = shard.group
        self._engine = engine
        self._model = shard.model
        self._device = engine.flat.device

    @torch.no_grad()
    def run(self, micro: MicroBatch) -> None:
        shard = self._shard
        # a forward may draw numbers in evaluation mode, too, and the first stage alone runs it
        with self._engine.flat.full_params(), shard.precision(), fork_rng(self._device):
            with evaluating(self._model):
                self._compare_outputs(micro)
            # elsewhere a worker has parts of gradients that are added up later
            is_plain = type(self._engine.flat) is FlatParams
            if is_plain and shard.experts is None and shard.context is None:
                self._compare_gradients(micro)

    def _compare_outputs(self, micro: MicroBatch) -> None:
        predicted = tensors_of(full_activations(self._engine.stage.predict(micro.inputs)))
        outputs = self._shard.broadcast(predicted)
        expected = self._expected(micro, nn.Module.eval, with_gradients=False)
        same = torch.ones(1, device=self._device)
        if self._group.rank == 0:
            same.fill_(expected.has_outputs(outputs))
        self._group.broadcast(same).wait()
        if not same:
            raise self._refusal(
                "do not compute what the model does: its forward uses more than its inputs and "
                "modules"
            )

    def _compare_gradients(self, micro: MicroBatch) -> None:
        modes: list[Quiet] = [nn.Module.eval]
        if self._shard.tensor is None:  # under tp heads of one layer draw numbers of their own
            modes.insert(0, evaluate_leaves)
        rows = [micro._replace(inputs=inputs) for inputs in _few_rows(micro.inputs)]
        for mode, part in itertools.product(modes, [*rows, micro]):
            quiet = partial(_quieten, mode)
            with preserve_modes(self._model):
                quiet(self._model)
                verdict = self._first_difference(part, quiet)
            if verdict == _SAME:
                return
            if verdict >= 0:
                raise self._refusal(
                    f"do not give {self._names()[int(verdict)]} the gradient that it has in the "
                    "model: its forward hides a gradient from autograd, or adds one to it, between "
                    "its modules"
                )
        self._shard.say(
            f"the gradients of the stages of {type(self._model).__name__} could not be compared "
            "with those of the model before the first step; its outputs were"
        )

    def _first_difference(self, micro: MicroBatch, quiet: Quiet) -> float:
        """The number of the first parameter with another gradient; the same on all stages."""
        try:
            expected = self._expected(micro, quiet)
        except Exception:  # in a mode that is neither training nor evaluating, or out of memory
            expected = None
        verdict = torch.tensor([_OTHER_OUTPUTS if expected is None else _SAME], device=self._device)
        self._agree(verdict, Op.MIN)
        if verdict == _OTHER_OUTPUTS:  # the model itself fails in this mode
            return _OTHER_OUTPUTS
        result = self._pass(micro)
        outputs = self._shard.broadcast(result.outputs)
        gradients = self._shard.gather(result.gradients)
        if expected is not None and self._group.rank == 0:
            verdict.fill_(self._judge(expected, outputs, _summed(gradients)))
        self._agree(verdict, Op.MAX)
        return float(verdict)

    def _agree(self, verdict: Tensor, op: Op) -> None:
        """The verdict of the first stage, of whose tensors each of its workers may have slices."""
        if self._group.rank == 0 and self._shard.tensor is not None:
            self._shard.tensor.group.all_reduce(verdict, op).wait()
        self._group.broadcast(verdict).wait()

    def _judge(
        self, expected: Computed, outputs: list[Tensor], gradients: dict[str, Tensor]
    ) -> float:
        if not expected.has_outputs(outputs):
            return _OTHER_OUTPUTS
        noise = noise_of(expected.gradients)
        for number, name in enumerate(self._names()):
            wanted = expected.gradients.get(name)
            if wanted is not None and self._shard.tensor is not None:
                wanted = self._shard.tensor.shard_of(name, wanted)
            if not is_same(wanted, gradients.get(name), noise):
                return float(number)
        return _SAME

    @torch.enable_grad()
    def _pass(self, micro: MicroBatch) -> Computed:
        """One forward and backward of the stages; outputs are known on the last one."""
        shard = self._shard
        flat = self._engine.flat
        chunks = range(shard.stages.chunks)
        actions = [Action(ActionKind.FORWARD, 0, chunk) for chunk in chunks]
        actions += [Action(ActionKind.BACKWARD, 0, chunk) for chunk in reversed(chunks)]
        pipeline = Pipeline("one pass", 1, len(chunks), [actions] * self._group.size)
        outputs: list[Tensor] = []

        def score(result: Tree, targets: Any) -> Tensor:
            found = tensors_of(full_activations(result))
            outputs.extend(t.detach() for t in found)
            scored = [t for t in found if t.requires_grad]
            return score_of(scored) if scored else torch.zeros((), requires_grad=True)

        kept = _KeptGradients(flat, shard.reduce_tied_grads)
        stage = PipelineStage(shard.stages, flat, pipeline, shard.channel, carries_rng=True)
        options = EngineOptions(forward_state=self._engine.forward_state)
        micro = MicroBatch(micro.inputs, None, 1.0, seed=micro.seed)
        with self._engine.frozen_statistics():
            Engine(stage, score, flat, actions, kept, options).run([micro], lambda bucket: None)
        names = {p: name for name, p in shard.named}
        return Computed(outputs, {names[p]: g for p, g in kept.gradients.pop(0, {}).items()})

    def _expected(self, micro: MicroBatch, quiet: Quiet, with_gradients: bool = True) -> Computed:
        """What the whole model computes, on the first stage."""
        shard = self._shard
        tensors = self._gather_tensors()
        if self._group.rank != 0:
            return Computed([], {})
        whole = self._model if shard.tensor is None else shard.tensor.original
        aliases = shard.stages.aliases
        wanted: dict[str, Tensor] = {}
        if with_gradients:
            named = tensors.items()
            leaves = {n: t.detach().clone() for n, t in named if aliases.get(n, n) == n}
            trained = [n for n, p in self._model.named_parameters() if p.requires_grad]
            wanted = {n: leaves[n].requires_grad_() for n in trained if n in leaves}
            # tp knows a tied tensor by the name of the layer that it splits
            tensors = {name: leaves[aliases.get(name, name)] for name in tensors}
            seed_forward(self._device, micro.seed)
        args, kwargs = call_arguments(micro.inputs)
        with (
            preserve_modes(whole),
            torch.set_grad_enabled(with_gradients),
            _reparametrize_module(whole, tensors),
        ):
            quiet(whole)
            outputs = tensors_of(full_activations(whole(*args, **kwargs)))
            gradients = gradients_of(outputs, wanted)
        return Computed([t.detach() for t in outputs], gradients)

    def _names(self) -> list[str]:
        return [name for name, _ in self._model.named_parameters()]

    def _gather_tensors(self) -> dict[str, Tensor]:
        """The full tensors of all stages by name, on the first stage."""
        local = {s.name: s.tensor for s in tensor_slots(self._model) if not s.tensor.is_meta}
        gathered = reversed(self._shard.gather(local))
        tensors = {n: t for stage in gathered for n, t in stage.items()}
        if self._group.rank == 0 and self._shard.tensor is not None:
            return self._shard.tensor.gather_full(tensors)
        return tensors

    def _refusal(self, what: str) -> BadInput:
        return BadInput(
            f"the stages of {type(self._model).__name__}, split at "
            f"{', '.join(self._shard.stages.cuts)}, {what}; put what is special about it into a "
            "module of its own"
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, where dropout does not stand in the way of comparing."""
    with preserve_modes(model):
        model.eval()
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError) as wrong:
            raise BadInput(
                f"{type(model).__name__} fails in evaluation mode "
                f"({type(wrong).__name__}: {wrong}), in which pp compares its stages with the "
                "whole model before the first step: let its forward return the same kind of "
                "output in both modes"
            ) from wrong


def _few_rows(inputs: Tree) -> list[Tree]:
    """The first rows of a batch, where its tensors have as many as each other."""
    rows = {len(t) for t in tensors_of(inputs) if t.dim()}
    if len(rows) != 1 or max(rows) <= _ROWS:
        return []
    return [map_tensors(lambda t: t[:_ROWS] if t.dim() else t, inputs)]


def _quieten(quiet: Quiet, model: nn.Module) -> None:
    quiet(model)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):  # cuDNN has its backward in training mode alone
            module.train()


def _summed(stages: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A tensor that several stages use has a part of its gradient on each."""
    total: dict[str, Tensor] = {}
    for gradients in stages:
        for name, grad in gradients.items():
            total[name] = total[name] + grad if name in total else grad
    return total
