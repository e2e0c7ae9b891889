"""Before the first step: the stages of a pipeline together compute what the model does.

The first stage gets the tensors of all stages and runs the whole model on the first micro-batch.
Outputs are compared in evaluation mode. Gradients are compared in training, but for layers, which
evaluate (BatchNorm keeps its statistics, dropout does nothing), with the same random numbers; where
outputs differ even so, such as by numbers that numpy draws, in evaluation mode.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.comm.group import Group, Op
from shoal.comm.objects import PytreeWork
from shoal.errors import BadInput
from shoal.pytree import Tree, map_tensors, tensors_of
from shoal.replica.engine import Engine
from shoal.replica.flat.params import FlatParams
from shoal.replica.microbatch import (
    MicroBatch,
    Quiet,
    call_arguments,
    default_generators,
    evaluate_leaves,
    fork_rng,
    preserve_modes,
    seed_forward,
)
from shoal.replica.pipeline.stage_io import BACKWARD, PipelineStage, message_tag
from shoal.replica.pipeline.stages import Stages, named_tensors
from shoal.replica.split.comparison import Computed, gradients_of, is_same, noise_of, score_of
from shoal.replica.split.shard import ReplicaShard
from shoal.replica.split.sharded_tensor import full_activations
from shoal.schedules.pipelines.actions import Action, ActionKind

Named = Sequence[tuple[str, nn.Parameter]]


class PassResult(NamedTuple):
    """`outputs` are those of the model, on the last stage; `gradients` those of this stage."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]


class _Chunk(NamedTuple):
    virtual: int
    source: int | None  # the stage before, and the one behind
    target: int | None
    received: list[Tensor]  # that want a gradient
    outputs: list[Tensor]


class OnePass:
    def __init__(self, stage: PipelineStage, named: Named, device: torch.device):
        self._stage = stage
        self._channel = stage.messages.channel
        self._trained = [(name, p) for name, p in named if p.requires_grad]
        self._generators = default_generators(device)
        self._device = device
        self._sent: list[PytreeWork] = []

    @torch.enable_grad()
    def run(self, inputs: Tree, seed: int) -> PassResult:
        seed_forward(self._device, seed)
        chunks = range(self._stage.messages.pipeline.chunks)
        computed = [self._forward(chunk, inputs, seed) for chunk in chunks]
        gradients: dict[str, Tensor] = {}
        for chunk in reversed(computed):
            self._backward(chunk, gradients)
        for sent in self._sent:
            sent.wait()
        last = computed[-1]
        outputs = last.outputs if last.target is None else []
        return PassResult([t.detach() for t in outputs], gradients)

    def _forward(self, chunk: int, inputs: Tree, seed: int) -> _Chunk:
        messages = self._stage.messages
        action = Action(ActionKind.FORWARD, 0, chunk)
        virtual = messages.virtual(action)
        source = messages.pipeline.producer(messages.stage, action)
        target = messages.pipeline.consumer(messages.stage, action)
        values = self._stage.stages.bind_inputs(inputs)[1]
        if source is not None:
            values, states = self._channel.recv(source.stage, message_tag(virtual, 0))
            self._set_random(states, seed)
        outputs = self._stage.stages.compute(virtual, inputs, values)
        if target is not None:
            states = [generator.get_state() for generator in self._generators]
            self._send((outputs, states), target.stage, message_tag(virtual + 1, 0))
        return _Chunk(
            virtual,
            None if source is None else source.stage,
            None if target is None else target.stage,
            [t for t in tensors_of(values) if t.requires_grad] if source is not None else [],
            tensors_of(outputs if target is not None else full_activations(outputs)),
        )

    def _set_random(self, states: list[Tensor], seed: int) -> None:
        """As the stage before has left them; a stage that runs the whole forward begins it."""
        if self._stage.stages.replays:
            seed_forward(self._device, seed)
            return
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state.cpu())

    def _backward(self, chunk: _Chunk, gradients: dict[str, Tensor]) -> None:
        roots = [t for t in chunk.outputs if t.requires_grad]
        arrived: list[Any] = [None]
        if chunk.target is None:
            roots = [score_of(roots)] if roots else []
        else:
            arrived = self._channel.recv(chunk.target, message_tag(chunk.virtual + 1, 0, BACKWARD))
        pairs = [(t, g) for t, g in zip(roots, arrived, strict=False)]
        pairs = [(t, g) for t, g in pairs if g is not None or chunk.target is None]
        found = self._gradients(pairs, chunk.received)
        for (name, _), grad in zip(self._trained, found[len(chunk.received) :], strict=True):
            if grad is not None:
                gradients[name] = gradients[name] + grad if name in gradients else grad
        if chunk.source is not None:
            received = list(found[: len(chunk.received)])
            self._send(received, chunk.source, message_tag(chunk.virtual, 0, BACKWARD))

    def _gradients(
        self, pairs: list[tuple[Tensor, Any]], received: list[Tensor]
    ) -> Sequence[Tensor | None]:
        leaves = [*received, *(p for _, p in self._trained)]
        if not pairs or not leaves:
            return [None] * len(leaves)
        roots, grads = zip(*pairs, strict=True)
        return torch.autograd.grad(roots, leaves, grads, allow_unused=True)

    def _send(self, tree: Tree, stage: int, tag: int) -> None:
        self._sent.append(self._channel.send(tree, stage, tag))


_ROWS = 2  # of the micro-batch: they are enough to see a gradient, and need little memory
_SAME = -1.0  # what is sent instead of the number of a parameter
_OTHER_OUTPUTS = -2.0


class StageCheck:
    """Compares the stages with the model; raises `BadInput` on all of them."""

    def __init__(self, shard: ReplicaShard, stages: Stages, group: Group, engine: Engine):
        self._shard = shard
        self._stages = stages
        self._group = group
        self._engine = engine
        self._model = shard.model
        self._device = engine.flat.device

    @torch.no_grad()
    def run(self, micro: MicroBatch) -> None:
        with self._engine.flat.full_params(), self._shard.precision():
            with evaluating(self._model):
                self._compare_outputs(micro.inputs)
            if self._has_own_gradients():
                self._compare_gradients(micro)

    def _has_own_gradients(self) -> bool:
        """Whether a worker has the gradients of its stage, not parts that are added up later."""
        shard = self._shard
        is_plain = type(self._engine.flat) is FlatParams
        return is_plain and shard.experts is None and shard.context is None

    # ------------------------------------------------------------------ outputs

    def _compare_outputs(self, inputs: Tree) -> None:
        same = torch.ones(1, device=self._device)
        predicted = tensors_of(full_activations(self._engine.predict(inputs)))
        outputs = self._shard.broadcast(predicted)
        tensors = self._gather_tensors()
        if self._group.rank == 0:
            whole = self._whole()
            args, kwargs = call_arguments(inputs)
            with preserve_modes(whole):
                whole.eval()
                expected = functional_call(whole, tensors, args, kwargs, tie_weights=False)
            found = Computed(tensors_of(full_activations(expected)), {})
            same.fill_(found.has_outputs(outputs))
        self._group.broadcast(same).wait()
        if not same:
            raise self._refusal(
                "do not compute what the model does: its forward uses more than its inputs and "
                "modules"
            )

    # ------------------------------------------------------------------ gradients

    def _compare_gradients(self, micro: MicroBatch) -> None:
        modes: list[Quiet] = [nn.Module.eval]
        if self._shard.tensor is None:  # under tp heads of one layer draw numbers of their own
            modes.insert(0, evaluate_leaves)
        rows = [micro._replace(inputs=inputs) for inputs in _few_rows(micro.inputs)]
        for quiet, part in itertools.product(modes, [*rows, micro]):
            with fork_rng(self._device), preserve_modes(self._model):
                _quieten(self._model, quiet)
                verdict = self._first_difference(part, quiet)
            if verdict == _SAME:
                return
            if verdict >= 0:
                name = self._names()[int(verdict)]
                raise self._refusal(
                    f"do not give {name} the gradient that it has in the model: its forward hides "
                    "a gradient from autograd, or adds one to it, between its modules"
                )
        self._shard.say(
            f"the gradients of the stages of {type(self._model).__name__} could not be compared "
            "with those of the model before the first step; its outputs were"
        )

    def _first_difference(self, micro: MicroBatch, quiet: Quiet) -> float:
        """The number of the first parameter with another gradient; the same on all stages."""
        expected = self._expected(micro, quiet)
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

    def _pass(self, micro: MicroBatch) -> PassResult:
        stage = self._engine.stage
        assert isinstance(stage, PipelineStage)
        with self._engine.frozen_statistics():
            return OnePass(stage, self._shard.named, self._device).run(micro.inputs, micro.seed)

    def _expected(self, micro: MicroBatch, quiet: Quiet) -> Computed | None:
        """What the whole model computes, on the first stage; None where it cannot."""
        tensors = self._gather_tensors()
        if self._group.rank != 0:
            return Computed([], {})
        trained = {name for name, p in self._model.named_parameters() if p.requires_grad}
        aliases = self._stages.aliases
        leaves = {n: t.detach().clone() for n, t in tensors.items() if aliases.get(n, n) == n}
        for name in trained & set(leaves):
            leaves[name].requires_grad_()
        full = {name: leaves[aliases.get(name, name)] for name in tensors}
        wanted = {name: t for name, t in leaves.items() if name in trained}
        try:
            return self._run_whole(micro, quiet, full, wanted)
        except Exception:  # in a mode that is neither training nor evaluating, or out of memory
            return None

    @torch.enable_grad()
    def _run_whole(
        self, micro: MicroBatch, quiet: Quiet, full: dict[str, Tensor], wanted: dict[str, Tensor]
    ) -> Computed:
        whole = self._whole()
        args, kwargs = call_arguments(micro.inputs)
        with preserve_modes(whole):
            _quieten(whole, quiet)
            seed_forward(self._device, micro.seed)
            result = functional_call(whole, full, args, kwargs, tie_weights=False)
        outputs = tensors_of(full_activations(result))
        gradients = gradients_of(outputs, wanted)
        return Computed([t.detach() for t in outputs], gradients)

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

    # ------------------------------------------------------------------ the whole model

    def _names(self) -> list[str]:
        return [name for name, _ in self._model.named_parameters()]

    def _whole(self) -> nn.Module:
        """The model as it was built."""
        return self._model if self._shard.tensor is None else self._shard.tensor.original

    def _gather_tensors(self) -> dict[str, Tensor]:
        """The full tensors of all stages by name, on the first stage."""
        local = {n: t for n, t in named_tensors(self._model) if t.device.type != "meta"}
        gathered = reversed(self._shard.gather(local))
        tensors = {n: t for stage in gathered for n, t in stage.items()}
        if self._group.rank == 0 and self._shard.tensor is not None:
            return self._shard.tensor.gather_full(tensors)
        return tensors

    def _refusal(self, what: str) -> BadInput:
        return BadInput(
            f"the stages of {type(self._model).__name__}, split at "
            f"{', '.join(self._stages.cuts)}, {what}; put what is special about it into a module "
            "of its own"
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


def _quieten(model: nn.Module, quiet: Quiet) -> None:
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
