"""One forward and backward through all stages, one after the other, without the engine.

The backward starts at a fixed combination of the model's outputs, and gradients are returned; those
of training are left alone. Random numbers travel from stage to stage, so dropout is the same as in
the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.objects import PytreeWork
from shoal.pytree import Tree, tensors_of
from shoal.replica.comparison import score_of
from shoal.replica.microbatch import default_generators, seed_forward
from shoal.replica.pipeline.stage_io import BACKWARD, PipelineStage, message_tag
from shoal.replica.tensor.activations.sharded_tensor import full_tensors
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
            tensors_of(outputs if target is not None else full_tensors(outputs)),
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
