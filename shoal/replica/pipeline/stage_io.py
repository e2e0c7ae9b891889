"""Messages around the actions of a stage: activations go forward, gradients back.

A message is tagged by direction, virtual stage and micro-batch, so that messages may overtake
each other. A send returns at once. What is sent is held until its receiver is known to have it,
which follows from the schedule: a stage that sends the result of an action has finished all
actions before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from shoal.comm.objects import PytreeChannel, PytreeWork
from shoal.pytree import Tree
from shoal.replica.context.sequence_shard import in_full
from shoal.replica.engine import Stage
from shoal.replica.flat_params import FlatParams
from shoal.replica.microbatch_context import (
    MicroBatch,
    fork_rng,
    get_generators,
    seed_forward,
    set_generators,
)
from shoal.replica.pipeline.stages import Stages
from shoal.runtime.trace import OFF, Tracer
from shoal.schedules.pipelines import Action, ActionKind, Pipeline, VirtualStage, virtual_index

FORWARD = 0  # the last two bits of a tag
BACKWARD = 1


class StageMessages:
    """Sends and receives for the actions of this rank's stage."""

    def __init__(self, pipeline: Pipeline, channel: PytreeChannel, tracer: Tracer):
        self.pipeline = pipeline
        self.channel = channel
        self.stage = channel.group.rank
        self._tracer = tracer
        self._position = {
            (stage, action): position
            for stage, actions in enumerate(pipeline.actions)
            for position, action in enumerate(actions)
        }
        self.begin()

    def begin(self) -> None:
        # by receiver, with the position of the receiver's action that takes it
        self.held: dict[int, list[tuple[int, PytreeWork]]] = {}

    def recv(self, action: Action) -> Tree:
        """What the stage computed that comes before this one in the action's direction."""
        source = self.pipeline.producer(self.stage, action)
        assert source is not None
        tag = message_tag(self.virtual(action), action.microbatch, _direction(action))
        with self._tracer.span("wait", f"receive {action}"):
            tree = self.channel.recv(source.stage, tag)
        self._release(source, action)
        return tree

    def send(self, action: Action, tree: Tree) -> None:
        """To the next stage in the action's direction, if there is one."""
        target = self.pipeline.consumer(self.stage, action)
        if target is None:
            return
        direction = _direction(action)
        virtual = self.virtual(action) + (1 if direction == FORWARD else -1)
        with self._tracer.span("send", str(action)):
            sent = self.channel.send(
                tree, target.stage, message_tag(virtual, action.microbatch, direction)
            )
        self.held.setdefault(target.stage, []).append((self._position_at(target, action), sent))

    def finish(self) -> None:
        for messages in self.held.values():
            for _, sent in messages:
                sent.wait()

    def virtual(self, action: Action) -> int:
        return virtual_index(self.pipeline.stages, self.stage, action.chunk)

    def _release(self, source: VirtualStage, action: Action) -> None:
        """What that stage received before it sent this."""
        done = self._position_at(source, action)
        messages = self.held.get(source.stage, [])
        for position, sent in messages:
            if position <= done:
                sent.wait()
        self.held[source.stage] = [one for one in messages if one[0] > done]

    def _position_at(self, other: VirtualStage, action: Action) -> int:
        """Where the action of that stage for this micro-batch, in this direction, stands."""
        kinds = [ActionKind.FORWARD]
        if action.kind is not ActionKind.FORWARD:
            kinds = [ActionKind.BACKWARD, ActionKind.INPUT]
        found = [(other.stage, Action(kind, action.microbatch, other.chunk)) for kind in kinds]
        return next(self._position[key] for key in found if key in self._position)


class PipelineStage(Stage):
    """The stage of this rank, for the engine.

    With `carries_rng` the states of random generators travel with the activations, so that
    dropout is the same as on one worker.
    """

    def __init__(
        self, stages: Stages, messages: StageMessages, flat: FlatParams, carries_rng: bool
    ):
        self.model = stages.model
        self.stages = stages
        self.messages = messages
        self._flat = flat
        self._carries_rng = carries_rng and not stages.replays
        self.is_last = messages.stage == stages.stages - 1
        self._rng_states: dict[tuple[int, int], list[Tensor]] = {}

    def begin(self) -> None:
        self._rng_states = {}
        self.messages.begin()

    def computes_loss(self, action: Action) -> bool:
        return self.messages.virtual(action) == self.stages.virtual_stages - 1

    def recv_inputs(self, action: Action, micro: MicroBatch) -> Tree:
        if self.messages.pipeline.producer(self.messages.stage, action) is None:
            return self.stages.bind_inputs(micro.inputs)[1]
        values = self.messages.recv(action)
        if self._carries_rng:
            values, self._rng_states[_key(action)] = values
        return values

    def compute(self, action: Action, micro: MicroBatch, inputs: Tree) -> Tree:
        self._seed(action, micro.seed)
        with self._flat.forward_context():
            return self.stages.compute(self.messages.virtual(action), micro.inputs, inputs)

    def send_outputs(self, action: Action, outputs: Tree) -> None:
        if self._carries_rng:
            outputs = (outputs, get_generators(self._flat.device))
        self.messages.send(action, outputs)

    def recv_grads(self, action: Action) -> Sequence[Tensor | None]:
        return list(self.messages.recv(action))

    def send_grads(self, action: Action, grads: Sequence[Tensor | None]) -> None:
        self.messages.send(action, list(grads))

    def finish(self) -> None:
        self.messages.finish()

    def predict(self, inputs: Any) -> Any:
        """The outputs of the model on the last stage; None on the others."""
        outputs = self.stages.bind_inputs(inputs)[1]
        messages = StageMessages(self.messages.pipeline, self.messages.channel, OFF)
        with fork_rng(self._flat.device) if self.stages.replays else nullcontext():
            for chunk in range(messages.pipeline.chunks):
                action = Action(ActionKind.FORWARD, 0, chunk)
                if messages.pipeline.producer(messages.stage, action) is not None:
                    outputs = messages.recv(action)
                if self.stages.replays:  # each stage begins the forward with the same seed
                    self._seed(action, 0)
                with self._flat.forward_context():
                    outputs = self.stages.compute(messages.virtual(action), inputs, outputs)
                messages.send(action, outputs)
        messages.finish()
        return in_full(outputs) if self.is_last else None

    def _seed(self, action: Action, seed: int) -> None:
        """Randomness of its own for every stage and micro-batch; or what the stage before left."""
        is_one_stream = self._carries_rng or self.stages.replays
        virtual = 0 if is_one_stream else self.messages.virtual(action)
        seed_forward(self._flat.device, seed + virtual)
        states = self._rng_states.get(_key(action))
        if states is not None:
            set_generators(self._flat.device, [state.cpu() for state in states])


def _key(action: Action) -> tuple[int, int]:
    return action.microbatch, action.chunk


def _direction(action: Action) -> int:
    return FORWARD if action.kind is ActionKind.FORWARD else BACKWARD


def message_tag(virtual: int, microbatch: int, direction: int = FORWARD) -> int:
    """Below 2^30, as groups want it, for up to 4096 virtual stages and 65535 micro-batches."""
    return (microbatch << 12 | virtual) << 2 | direction
