"""Runs one stage of a pipeline: its actions in order, and the messages that follow from them.

Activations go to the next virtual stage and gradients back, tagged by direction, virtual stage and
micro-batch, so that messages may overtake each other. A send returns at once; what is sent is held
until the receiver is known to have it, which follows from the schedule: whoever sends me the
result of an action has done all that stands before it in its list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.objects import PytreeChannel, PytreeWork
from shoal.pytree import Tree, map_tensors, tensors_of
from shoal.replica.engine import Engine, MicroBatch, generators_of, own_random_streams
from shoal.replica.grad_buckets import OnBucket
from shoal.replica.pipeline.split_backward import Halves
from shoal.replica.pipeline.stages import Stages
from shoal.replica.pipeline.tied_weights import Ties
from shoal.schedules.pipelines.actions import Action, Kind, Pipeline, Place, virtual_stage

_FORWARD, _BACKWARD, _RESULT = range(3)  # the last two bits of a tag
Where = tuple[int, int]  # micro-batch, chunk


class Live(NamedTuple):
    """What is kept of a forward. `outputs` is None where it is computed again.

    `wanted` tells which of the tensors that were sent on get a gradient back.
    """

    inputs: tuple[Any, ...]
    outputs: Tree
    wanted: list[bool]


class PipelineEngine(Engine):
    """Interprets the actions of this rank's stage."""

    def __init__(
        self,
        stages: Stages,
        pipeline: Pipeline,
        channel: PytreeChannel,
        ties: Ties,
        *args: Any,
        recompute: bool = False,
        **options: Any,
    ):
        """`args` and `options` are those of `Engine` from the loss on."""
        self.stages = stages
        self.pipeline = pipeline
        self.channel = channel
        self.ties = ties
        self.stage = channel.group.rank
        self.recompute = recompute
        self.is_last = self.stage == pipeline.stages - 1
        loss, flat = args
        super().__init__(stages.model, loss, flat, pipeline.actions[self.stage], **options)
        self.flat.splits_backward = any(action.kind is Kind.INPUT for action in self.actions)
        self.flat.grads.tied = {i for i, p in enumerate(flat.params) if ties.is_tied(p)}
        self._order = {
            (stage, action): place
            for stage, actions in enumerate(pipeline.actions)
            for place, action in enumerate(actions)
        }
        self._run = {
            Kind.FORWARD: self._go_forward,
            Kind.BACKWARD: self._go_backward,
            Kind.INPUT: self._go_to_inputs,
            Kind.WEIGHT: self._go_to_weights,
        }

    def run(self, microbatches: Sequence[MicroBatch], on_bucket: OnBucket) -> Tensor:
        self._microbatches = microbatches
        self._on_bucket = on_bucket
        self._live: dict[Where, Live] = {}
        self._halves: dict[Where, Halves] = {}
        self._parts: dict[int, Tensor] = {}  # losses
        self._apart: dict[int, dict[nn.Parameter, Tensor]] = {}  # gradients of a micro-batch
        self._streams: dict[Where, list[Tensor]] = {}
        # by peer, with the index of the action that receives it
        self._sent: dict[int, list[tuple[int, PytreeWork]]] = {}
        self._note_total(torch.zeros((), device=self.flat.device))
        with own_random_streams(self.flat.device):
            for action in self.actions[:-1]:
                self._run[action.kind](action)
            self._do_last(self.actions[-1])
        for sent in self._sent.values():
            for _, one in sent:
                one.wait()
        assert self._total is not None
        return self._total

    def predict(self, inputs: Any) -> Any:
        """The outputs of the model on the last stage; None on the others."""
        given, values = self.stages.arrange(inputs)
        under_way: list[PytreeWork] = []
        for chunk in range(self.pipeline.chunks):
            action = Action(Kind.FORWARD, 0, chunk)
            virtual = self._virtual(chunk)
            giver = self._giver(action)
            taker = self._taker(action)
            taken = values if giver is None else self.channel.recv(giver.stage, _tag(virtual, 0))
            with self.flat.computing():
                outputs = self.stages.compute(virtual, given, taken)
            if taker is None:
                values = outputs
            else:
                under_way.append(self.channel.send(outputs, taker.stage, _tag(virtual + 1, 0)))
        for sent in under_way:
            sent.wait()
        return values if self.is_last else None

    def share(self, value: Tree) -> Tree:
        """The last stage's value, on all stages: a tree of tensors and plain values."""
        last = self.pipeline.stages - 1
        if self.stage != last:
            return self.channel.recv(last, _RESULT)
        for sent in [self.channel.send(value, stage, _RESULT) for stage in range(last)]:
            sent.wait()
        return value

    # ------------------------------------------------------------------ the four actions

    def _go_forward(self, action: Action) -> None:
        micro = self._microbatches[action.microbatch]
        if micro.skip:
            return
        inputs = self._take_inputs(action, micro)
        with self.tracer.span("forward", str(action)):
            if self.recompute:
                with torch.no_grad():
                    outputs = self._compute(action, micro, inputs)
                outputs = _as_if_computed(inputs, outputs)
            else:
                outputs = self._compute(action, micro, inputs)
        wanted = [t.requires_grad for t in tensors_of(outputs)]
        kept = None if self.recompute else outputs
        self._live[_where(action)] = Live(inputs, kept, wanted)
        self._give(action, outputs)

    def _go_backward(self, action: Action) -> None:
        if not self._microbatches[action.microbatch].skip:
            inputs, roots, grads = self._start(action)
            with self.tracer.span("backward", str(action)):
                if roots:
                    torch.autograd.backward(roots, grads)
            self._give_gradients(action, [leaf.grad for leaf in inputs])
        self._set_apart(action)

    def _go_to_inputs(self, action: Action) -> None:
        if self._microbatches[action.microbatch].skip:
            return
        inputs, roots, grads = self._start(action)
        halves = self._halves[_where(action)] = Halves(roots, grads)
        with self.tracer.span("backward", str(action)):
            found = halves.inputs(inputs)
        self.flat.rest()
        self._give_gradients(action, found)

    def _go_to_weights(self, action: Action) -> None:
        halves = self._halves.pop(_where(action), None)
        if halves is not None:
            with self.tracer.span("backward", str(action)):
                for weight, grad in halves.weights():
                    # tensors that autograd hands out may be shared between weights
                    weight.grad = grad.clone() if weight.grad is None else weight.grad.add_(grad)
            self.flat.rest()
        self._set_apart(action)

    def _do_last(self, action: Action) -> None:
        """The last backward: after it gradients are final, first of all those at the end."""
        if self.every_microbatch:
            self._run[action.kind](action)
            self._hand_over_apart()
            return
        self.flat.grads.arm(self._on_bucket)
        self._run[action.kind](action)
        self.ties.add_up()
        self.flat.grads.flush()
        self.flat.rest()

    # ------------------------------------------------------------------ computing

    def _compute(self, action: Action, micro: MicroBatch, inputs: tuple[Any, ...]) -> Tree:
        """The outputs of a chunk; behind the last one the loss."""
        virtual = self._virtual(action.chunk)
        given, _ = self.stages.arrange(micro.inputs)
        self.presence.real = micro.real
        self._seed(_where(action), micro.seed + (0 if self.every_microbatch else virtual))
        with self._autocast():
            with self.flat.computing():
                outputs = self.stages.compute(virtual, given, inputs)
            is_end = virtual == self.stages.parts - 1
            return self._loss_of(outputs, micro) if is_end else outputs

    def _seed(self, where: Where, seed: int) -> None:
        """Randomness of its own for every stage and micro-batch; or what the stage before left."""
        states = self._streams.get(where)
        for i, generator in enumerate(generators_of(self.flat.device)):
            generator.manual_seed(seed)
            if states is not None:
                generator.set_state(states[i].cpu())

    def _start(self, action: Action) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
        """What the inputs' gradients are wanted of; where backward starts, and with what."""
        live = self._live.pop(_where(action))
        self._at = action.microbatch
        micro = self._microbatches[action.microbatch]
        grads: list[Tensor | None]
        if self._giver(action) is None:
            outputs = self._outputs(action, micro, live)
            roots = [outputs]
            grads = [self._start_of_backward(micro, outputs)]
        else:
            arrived = iter(self._take_gradients(action))
            outputs = self._outputs(action, micro, live)
            sent = zip(tensors_of(outputs), live.wanted, strict=True)
            pairs = [(root, next(arrived)) for root, wanted in sent if wanted]
            pairs = [(root, g) for root, g in pairs if root.requires_grad and g is not None]
            roots = [root for root, _ in pairs]
            grads = [grad for _, grad in pairs]
        leaves = [t for t in tensors_of(live.inputs) if t.requires_grad]
        return leaves, roots, grads

    def _outputs(self, action: Action, micro: MicroBatch, live: Live) -> Tree:
        if not self.recompute:
            return live.outputs
        with self.tracer.span("forward", f"{action} again"), self._noting_nothing():
            return self._compute(action, micro, live.inputs)

    @contextmanager
    def _noting_nothing(self) -> Iterator[None]:
        """A forward is computed again: statistics that it keeps are already up to date."""
        buffers = [b for b in self.stages.model.buffers() if b.device.type != "meta"]
        before = [b.clone() for b in buffers]
        self.presence.again = True
        try:
            yield
        finally:
            self.presence.again = False
            for buffer, value in zip(buffers, before, strict=True):
                buffer.data.copy_(value)  # unseen by autograd, which holds it but does not read it

    # ------------------------------------------------------------------ messages

    def _take_inputs(self, action: Action, micro: MicroBatch) -> tuple[Any, ...]:
        giver = self._giver(action)
        if giver is None:
            return self.stages.arrange(micro.inputs)[1]
        virtual = self._virtual(action.chunk)
        taken: tuple[Any, ...] = self._take(giver, action, _FORWARD, virtual)
        if self.every_microbatch:
            taken, self._streams[_where(action)] = taken
        return taken

    def _take_gradients(self, action: Action) -> list[Tensor | None]:
        giver = self._giver(action)
        assert giver is not None
        return list(self._take(giver, action, _BACKWARD, self._virtual(action.chunk)))

    def _give(self, action: Action, outputs: Tree) -> None:
        taker = self._taker(action)
        if taker is None:
            return
        if self.every_microbatch:  # the same bits as on one worker: dropout goes on from here
            states = [generator.get_state() for generator in generators_of(self.flat.device)]
            outputs = (outputs, states)
        self._send(taker, action, _FORWARD, self._virtual(action.chunk) + 1, outputs)

    def _give_gradients(self, action: Action, grads: Sequence[Tensor | None]) -> None:
        taker = self._taker(action)
        if taker is not None:
            self._send(taker, action, _BACKWARD, self._virtual(action.chunk) - 1, list(grads))

    def _take(self, giver: Place, action: Action, direction: int, virtual: int) -> Tree:
        with self.tracer.span("wait", f"receive {action}"):
            tree = self.channel.recv(giver.stage, _tag(virtual, action.microbatch, direction))
        self._let_go(giver, action)
        return tree

    def _send(self, taker: Place, action: Action, direction: int, virtual: int, tree: Tree) -> None:
        with self.tracer.span("send", str(action)):
            sent = self.channel.send(tree, taker.stage, _tag(virtual, action.microbatch, direction))
        self._sent.setdefault(taker.stage, []).append((self._place_at(taker, action), sent))

    def _let_go(self, giver: Place, action: Action) -> None:
        """What that stage took before it gave this."""
        done = self._place_at(giver, action)
        waiting = self._sent.get(giver.stage, [])
        for place, sent in waiting:
            if place <= done:
                sent.wait()
        self._sent[giver.stage] = [one for one in waiting if one[0] > done]

    def _place_at(self, place: Place, action: Action) -> int:
        """Where that stage's own action for this micro-batch, in this direction, stands."""
        kinds = [Kind.FORWARD] if action.kind is Kind.FORWARD else [Kind.BACKWARD, Kind.INPUT]
        for kind in kinds:
            found = self._order.get((place.stage, Action(kind, action.microbatch, place.chunk)))
            if found is not None:
                return found
        raise AssertionError(f"stage {place.stage} has no counterpart of {action}")

    def _virtual(self, chunk: int) -> int:
        return virtual_stage(self.pipeline.stages, self.stage, chunk)

    def _giver(self, action: Action) -> Place | None:
        return self.pipeline.giver(self.stage, action)

    def _taker(self, action: Action) -> Place | None:
        return self.pipeline.taker(self.stage, action)

    # ------------------------------------------------------------------ loss and gradients

    def _note_loss(self, part: Tensor) -> None:
        if self.every_microbatch:
            self._parts[self._at] = part
        else:
            assert self._total is not None
            self._note_total(self._total + part)

    def _note_total(self, total: Tensor) -> None:
        self._total = total
        self.flat.grads.record_loss(total)

    def _set_apart(self, action: Action) -> None:
        """Keep what this micro-batch added, for a sync that adds them up itself."""
        if not self.every_microbatch:
            return
        apart = self._apart.setdefault(action.microbatch, {})
        for p in self.flat.params:
            if p.grad is not None:
                apart[p] = apart[p] + p.grad if p in apart else p.grad
                p.grad = None

    def _hand_over_apart(self) -> None:
        """Micro-batch by micro-batch in their order, when all of them are through."""
        for m in range(len(self._microbatches)):
            for p, grad in self._apart.pop(m, {}).items():
                p.grad = grad
            self._note_total(self._parts.get(m, torch.zeros((), device=self.flat.device)))
            self.ties.add_up()
            self.flat.grads.arm(self._on_bucket)
            self.flat.grads.flush()
            self.flat.rest()


def _where(action: Action) -> Where:
    return action.microbatch, action.chunk


def _tag(virtual: int, microbatch: int, direction: int = _FORWARD) -> int:
    """Below 2^30, as groups want it, for up to 4096 virtual stages and 65535 micro-batches."""
    return (microbatch << 12 | virtual) << 2 | direction


def _as_if_computed(inputs: Tree, outputs: Tree) -> Tree:
    """Outputs that were computed without a graph, marked as if there was one."""
    given = {id(t) for t in tensors_of(inputs)}

    def mark(tensor: Tensor) -> Tensor:
        if id(tensor) in given or not tensor.is_floating_point():
            return tensor
        return tensor.detach().requires_grad_()

    return map_tensors(mark, outputs)
