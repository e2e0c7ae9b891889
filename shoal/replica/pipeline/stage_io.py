"""Messages around the actions of a stage: activations go forward, gradients back.

A message is tagged by direction, virtual stage and micro-batch, so that messages may overtake
each other. Where they cannot (NCCL), stages call them in one order: see `message_order`. A send
returns at once. What is sent is held until its receiver is known to have it,
which follows from the schedule: a stage that sends the result of an action has finished all
actions before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from shoal.comm.objects import Envelope, PytreeChannel, PytreeWork
from shoal.replica.compiled import Compiler
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
from shoal.runtime.pytree import Tree
from shoal.runtime.trace import OFF, Tracer
from shoal.schedules.pipelines import Action, ActionKind, Pipeline, virtual_index
from shoal.schedules.pipelines.message_order import (
    StageMessage,
    message_for,
    message_from,
    message_order,
)

FORWARD = 0  # the last two bits of a tag
BACKWARD = 1


class PipelineStage(Stage):
    """The stage of this rank, for the engine.

    With `carries_rng` the states of random generators travel with the activations, so that
    dropout is the same as on one worker.
    """

    has_neighbours = True

    def __init__(
        self,
        stages: Stages,
        flat: FlatParams,
        pipeline: Pipeline,
        channel: PytreeChannel,
        tracer: Tracer = OFF,
        carries_rng: bool = False,
    ):
        self.model = stages.model
        self.stages = stages
        self._flat = flat
        self._channel = channel
        self._tracer = tracer
        self._carries_rng = carries_rng and not stages.replays
        self._stage = channel.group.rank
        self.is_last = self._stage == stages.stages - 1
        self.follow(pipeline)
        self.begin()

    def compile(self, compiler: Compiler) -> None:
        self.stages.compile(compiler)

    def follow(self, pipeline: Pipeline) -> None:
        """The schedule of the next steps."""
        self._pipeline = pipeline
        self._position = {
            message_for(stage, action): position
            for stage, actions in enumerate(pipeline.actions)
            for position, action in enumerate(actions)
            if action.kind is not ActionKind.WEIGHT
        }
        in_order = self._channel.group.executor.in_order
        order = message_order(pipeline) if in_order else []
        self._number = {message: number for number, message in enumerate(order)}

    def begin(self) -> None:
        self._rng_states: dict[tuple[int, int], list[Tensor]] = {}
        # by receiver, with the position of the receiver's action that takes it
        self.held: dict[int, list[tuple[int, PytreeWork]]] = {}
        mine = [message for message in self._number if message.target.stage == self._stage]
        self._expected = deque(mine)  # where messages have an order: those not received yet

    def computes_loss(self, action: Action) -> bool:
        return self._virtual(action) == self.stages.virtual_stages - 1

    def recv_inputs(self, action: Action, micro: MicroBatch) -> Tree:
        if self._pipeline.producer(self._stage, action) is None:
            return self.stages.bind_inputs(micro.inputs)[1]
        values = self._recv(action)
        if self._carries_rng:
            values, self._rng_states[action.microbatch, action.chunk] = values
        return values

    def compute(self, action: Action, micro: MicroBatch, inputs: Tree) -> Tree:
        self._seed(action, micro.seed)
        with self._flat.forward_context():
            return self.stages.compute(self._virtual(action), micro.inputs, inputs)

    def send_outputs(self, action: Action, outputs: Tree) -> None:
        if self._carries_rng:
            outputs = (outputs, get_generators(self._flat.device))
        self.send(action, outputs)

    def recv_grads(self, action: Action) -> Sequence[Tensor | None]:
        return list(self._recv(action))

    def send_grads(self, action: Action, grads: Sequence[Tensor | None]) -> None:
        self.send(action, list(grads))

    def finish(self) -> None:
        for messages in self.held.values():
            for _, sent in messages:
                sent.wait()

    def predict(self, inputs: Any) -> Any:
        """The outputs of the model on the last stage; None on the others."""
        outputs = self.stages.bind_inputs(inputs)[1]
        chunks = range(self._pipeline.chunks)
        forwards = [Action(ActionKind.FORWARD, 0, chunk) for chunk in chunks]
        pipeline = Pipeline("forward", 1, len(chunks), [forwards] * self._pipeline.stages)
        messages = PipelineStage(self.stages, self._flat, pipeline, self._channel)
        with fork_rng(self._flat.device) if self.stages.replays else nullcontext():
            for action in forwards:
                if self._pipeline.producer(self._stage, action) is not None:
                    outputs = messages._recv(action)
                if self.stages.replays:  # each stage begins the forward with the same seed
                    self._seed(action, 0)
                with self._flat.forward_context():
                    outputs = self.stages.compute(self._virtual(action), inputs, outputs)
                messages.send(action, outputs)
        messages.finish()
        return in_full(outputs) if self.is_last else None

    def _seed(self, action: Action, seed: int) -> None:
        """Randomness of its own for every stage and micro-batch; or what the stage before left."""
        is_one_stream = self._carries_rng or self.stages.replays
        seed_forward(self._flat.device, seed + (0 if is_one_stream else self._virtual(action)))
        states = self._rng_states.get((action.microbatch, action.chunk))
        if states is not None:
            set_generators(self._flat.device, [state.cpu() for state in states])

    # ------------------------------------------------------------------ messages

    def _recv(self, action: Action) -> Tree:
        """What the stage computed that comes before this one in the action's direction.

        It has received, by then, what was sent to it for its actions before that one.
        """
        source = self._pipeline.producer(self._stage, action)
        assert source is not None
        message = message_for(self._stage, action)
        with self._tracer.span("wait", f"receive {action}", action.microbatch):
            if self._expected:
                self._expect(self._due(self._number[message] + 1))
            tree = self._channel.recv(source.stage, self._tag(message))
        done = self._position[message._replace(target=source)]
        messages = self.held.get(source.stage, [])
        for position, sent in messages:
            if position <= done:
                sent.wait()
        self.held[source.stage] = [one for one in messages if one[0] > done]
        return tree

    def send(self, action: Action, tree: Tree) -> None:
        """To the next stage in the action's direction, if there is one."""
        message = message_from(self._pipeline, self._stage, action)
        if message is None:
            return
        target = message.target.stage
        with self._tracer.span("send", action, action.microbatch):
            due = self._due(self._number[message]) if self._expected else []
            self._expect(due[:-1])
            envelope = Envelope(target, self._tag(message), tree)
            sent = self._channel.exchange([envelope], due[-1:])
        self.held.setdefault(target, []).append((self._position[message], sent))

    def _expect(self, due: list[Envelope]) -> None:
        """One by one: none waits until the next is announced."""
        for envelope in due:
            self._channel.exchange([], [envelope])

    def _due(self, number: int) -> list[Envelope]:
        """What other stages send to this one before the message of that number."""
        due = []
        while self._expected and self._number[self._expected[0]] < number:
            message = self._expected.popleft()
            source = self._stage + (-1 if message.is_forward else 1)
            due.append(Envelope(source % self._pipeline.stages, self._tag(message)))
        return due

    def _tag(self, message: StageMessage) -> int:
        """Below 2^30, as groups want it, for up to 4096 virtual stages and 65535 micro-batches."""
        stage, chunk = message.target
        virtual = virtual_index(self._pipeline.stages, stage, chunk)
        direction = FORWARD if message.is_forward else BACKWARD
        return (message.microbatch << 12 | virtual) << 2 | direction

    def _virtual(self, action: Action) -> int:
        return virtual_index(self._pipeline.stages, self._stage, action.chunk)
