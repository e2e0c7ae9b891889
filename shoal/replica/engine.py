"""Walks one replica's schedule: forward and backward of every micro-batch, and nothing else.

    action           receives              computes                        sends
    F  forward       activations           outputs, or the loss            activations
    B  backward      gradients of outputs  gradients of inputs and weights gradients of inputs
    I  backward      gradients of outputs  gradients of inputs             gradients of inputs
    W  backward      -                     gradients of weights            -

The engine knows no other replica. Messages between the stages of this one are sent and received
by its `Stage`. When gradients are final, `on_bucket` reports them to the sync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.replica.accumulation import StepAccumulation
from shoal.replica.batchnorm import ForwardState
from shoal.replica.flat_params import FlatParams
from shoal.replica.forward_buffers import ForwardBuffers
from shoal.replica.grad_buckets import OnBucket
from shoal.replica.loss import StepNumbers, split_numbers
from shoal.replica.microbatch_context import (
    Loss,
    MicroBatch,
    Precision,
    autocast_for,
    call_model,
    fork_rng,
    seed_forward,
)
from shoal.runtime.pytree import Tree, map_tensors, tensors_of
from shoal.runtime.trace import OFF, Tracer
from shoal.schedules.pipelines import Action, ActionKind

if TYPE_CHECKING:
    from shoal.replica.compiled import Compiler
    from shoal.replica.pipeline.split_backward import SplitBackward


class Stage:
    """The only stage of a replica that is not pipelined: no messages.

    The stages of a pipeline override all of it.
    """

    is_last = True  # whether the model's outputs and the loss are known here
    has_neighbours = False  # which get its outputs, or give it inputs

    def __init__(self, model: nn.Module, device: torch.device):
        self.model = model
        self._device = device
        self._compiled: Callable[..., Any] = model

    def compile(self, compiler: Compiler) -> None:
        """Compile what is computed here from now on."""
        self._compiled = compiler(self.model)

    def begin(self) -> None:
        return None

    def computes_loss(self, action: Action) -> bool:
        return True

    def recv_inputs(self, action: Action, micro: MicroBatch) -> Tree:
        return micro.inputs

    def compute(self, action: Action, micro: MicroBatch, inputs: Tree) -> Tree:
        seed_forward(self._device, micro.seed)
        return call_model(self._compiled, inputs)

    def send_outputs(self, action: Action, outputs: Tree) -> None:
        return None

    def recv_grads(self, action: Action) -> Sequence[Tensor | None]:
        """The gradients of the outputs that require one."""
        raise AssertionError("a backward of the whole model starts at the loss")

    def send_grads(self, action: Action, grads: Sequence[Tensor | None]) -> None:
        return None

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""

    def predict(self, inputs: Any) -> Any:
        """The outputs of the model where `is_last`, else None; for `job.evaluate`."""
        return call_model(self._compiled, inputs)


Key = tuple[int, int]  # micro-batch, chunk


@dataclass(frozen=True)
class EngineOptions:
    """`every_microbatch`: gradients of micro-batches are not added up here.

    `recompute`: keep the inputs of a forward only, and compute it again before its backward.
    """

    precision: Precision = "fp32"
    every_microbatch: bool = False
    gradient_scale: float = 1.0
    loss_scale: Callable[[Tensor], Tensor] | None = None
    forward_state: ForwardState = field(default_factory=ForwardState)
    tracer: Tracer = OFF
    recompute: bool = False


class Kept(NamedTuple):
    """What is kept of a forward. `outputs` is None where it is computed again.

    `has_grad` says which of the output tensors get a gradient back.
    """

    inputs: Tree
    outputs: Tree
    has_grad: list[bool]


class Roots(NamedTuple):
    """Where a backward starts, with which gradients; `inputs` are the leaves that want one."""

    inputs: list[Tensor]
    tensors: list[Tensor]
    grads: list[Tensor | None]


class Engine:
    """Runs the actions of one stage."""

    def __init__(
        self,
        stage: Stage,
        loss: Loss,
        flat: FlatParams,
        actions: Sequence[Action],
        accumulation: StepAccumulation,
        options: EngineOptions,
    ):
        self.stage = stage
        self.loss = loss
        self.flat = flat
        self.actions = actions
        self.numbers = StepNumbers()
        self.accumulation = accumulation
        self.options = options
        self.gradient_scale = options.gradient_scale  # backward starts with this factor
        self.forward_state = options.forward_state
        self.autocast = autocast_for(flat.device, options.precision)
        self.written_once: list[str] = []  # buffers, by the forwards of a step as if by one
        self._span = options.tracer.span
        self._actions = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.INPUT: self._backward_input,
            ActionKind.WEIGHT: self._backward_weight,
        }

    def run(self, microbatches: Sequence[MicroBatch], on_bucket: OnBucket) -> Tensor:
        """One step's computing; returns the weighted loss of these rows."""
        self._microbatches = microbatches
        self._kept: dict[Key, Kept] = {}
        self._split: dict[Key, SplitBackward] = {}
        written = self.written_once
        self._buffers = ForwardBuffers(self.stage.model, written) if written else None
        self.accumulation.begin(on_bucket, len(microbatches))
        self.stage.begin()
        self.numbers.begin()
        last = len(self.actions) - 1
        with fork_rng(self.flat.device):
            for i, action in enumerate(self.actions):
                self.accumulation.before(action, i == last)
                self._actions[action.kind](action)
                self.accumulation.after(action, i == last)
            loss = self.accumulation.finish()
        self.stage.finish()
        return loss

    @torch.no_grad()
    def dry_forward(self, inputs: Any) -> dict[str, Tensor]:
        """A forward in the model's present mode that leaves nothing behind.

        Returns what it has written into buffers, by name, besides those of BatchNorm.
        """
        with fork_rng(self.flat.device), self.frozen_statistics() as before, self.autocast():
            self.stage.predict(inputs)
            return before.written()

    # ------------------------------------------------------------------ the four actions

    def _forward(self, action: Action) -> None:
        micro = self._microbatches[action.microbatch]
        if micro.skip:
            return
        inputs = self.stage.recv_inputs(action, micro)
        recompute = self.options.recompute
        has_grad: list[bool] = []
        with self._span("forward", action, action.microbatch):
            if recompute:
                outputs = _require_grad(inputs, self._compute_without_graph(action, micro, inputs))
            else:
                outputs = self._compute(action, micro, inputs)
        if self.stage.has_neighbours:
            has_grad = [t.requires_grad for t in tensors_of(outputs)]
        self._kept[_key(action)] = Kept(inputs, None if recompute else outputs, has_grad)
        self.stage.send_outputs(action, outputs)

    def _backward(self, action: Action) -> None:
        if self._skips(action):
            return
        roots = self._roots(action)
        with self._span("backward", action, action.microbatch):
            if roots.tensors:
                torch.autograd.backward(roots.tensors, roots.grads)
        self.stage.send_grads(action, [leaf.grad for leaf in roots.inputs])

    def _backward_input(self, action: Action) -> None:
        from shoal.replica.pipeline.split_backward import SplitBackward

        if self._skips(action):
            return
        roots = self._roots(action)
        split = SplitBackward(roots.tensors, roots.grads)
        self._split[_key(action)] = split
        with self._span("backward", action, action.microbatch):
            grads = split.input_grads(roots.inputs)
        self.flat.reshard()
        self.stage.send_grads(action, grads)

    def _backward_weight(self, action: Action) -> None:
        split = self._split.pop(_key(action), None)
        if split is None:
            return
        with self._span("weight gradient", action, action.microbatch):
            for weight, grad in split.weight_grads():
                # tensors that autograd hands out may be shared between weights
                weight.grad = grad.clone() if weight.grad is None else weight.grad.add_(grad)
        self.flat.reshard()

    def _skips(self, action: Action) -> bool:
        """Whether no rank has rows of this micro-batch; its loss is then 0."""
        skips = self._microbatches[action.microbatch].skip
        if skips and self.stage.computes_loss(action):
            self.accumulation.add_loss(action.microbatch, torch.zeros((), device=self.flat.device))
        return skips

    # ------------------------------------------------------------------ computing

    @torch.no_grad()
    def _compute_without_graph(self, action: Action, micro: MicroBatch, inputs: Tree) -> Tree:
        return self._compute(action, micro, inputs)

    def _compute(self, action: Action, micro: MicroBatch, inputs: Tree) -> Tree:
        """The outputs of a chunk; behind the last one the loss."""
        self.forward_state.rows_are_real = micro.real
        with self.autocast():
            if self._buffers is None:
                outputs = self.stage.compute(action, micro, inputs)
            else:
                with self._buffers.written_once():
                    outputs = self.stage.compute(action, micro, inputs)
            if not self.stage.computes_loss(action):
                return outputs
            return self._loss_of(action.microbatch, outputs, micro)

    def _loss_of(self, microbatch: int, outputs: Any, micro: MicroBatch) -> Tensor:
        if micro.weightless and self.numbers.names is not None:
            return _zero_loss(outputs)
        loss, numbers = split_numbers(self.loss(outputs, micro.targets))
        self.numbers.note(microbatch, numbers)
        if micro.weightless:
            return _zero_loss(outputs)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise BadInput(
                "the loss function has to return one number, the mean over the samples, and it "
                f"returned {tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__}"
            )
        return loss

    @contextmanager
    def frozen_statistics(self) -> Iterator[ForwardBuffers]:
        """A forward is computed again: the buffers that it updates are already up to date."""
        before = ForwardBuffers(self.stage.model)
        self.forward_state.is_recomputed = True
        try:
            yield before
        finally:
            self.forward_state.is_recomputed = False
            before.restore()

    # ------------------------------------------------------------------ where backward starts

    def _roots(self, action: Action) -> Roots:
        kept = self._kept.pop(_key(action))
        micro = self._microbatches[action.microbatch]
        inputs = []
        if self.stage.has_neighbours:
            inputs = [t for t in tensors_of(kept.inputs) if t.requires_grad]
        has_loss = self.stage.computes_loss(action)
        arrived = iter([] if has_loss else self.stage.recv_grads(action))
        outputs = kept.outputs
        if self.options.recompute:
            again = self._span("forward", f"{action} again", action.microbatch)
            with again, self.frozen_statistics():
                outputs = self._compute(action, micro, kept.inputs)
        if has_loss:
            return Roots(inputs, [outputs], [self._loss_gradient(action, micro, outputs)])
        flags = zip(tensors_of(outputs), kept.has_grad, strict=True)
        pairs = [(t, next(arrived)) for t, has in flags if has]
        pairs = [(t, grad) for t, grad in pairs if t.requires_grad and grad is not None]
        return Roots(inputs, [t for t, _ in pairs], [grad for _, grad in pairs])

    def _loss_gradient(self, action: Action, micro: MicroBatch, loss: Tensor) -> Tensor | None:
        """The gradient of the global loss by this one: its weight. None stands for 1."""
        options = self.options
        weight = micro.weight() if callable(micro.weight) else micro.weight
        self.numbers.weigh(action.microbatch, weight)
        is_unscaled = options.loss_scale is None and self.gradient_scale == 1.0
        if isinstance(weight, float) and weight == 1.0 and is_unscaled:
            self.accumulation.add_loss(action.microbatch, loss.detach())
            return None
        factor = torch.as_tensor(weight, dtype=loss.dtype, device=loss.device)
        self.accumulation.add_loss(action.microbatch, loss.detach() * factor)
        gradient = factor * self.gradient_scale
        return gradient if options.loss_scale is None else options.loss_scale(gradient)


def _key(action: Action) -> Key:
    return action.microbatch, action.chunk


def _zero_loss(outputs: Any) -> Tensor:
    """A loss of 0 that reaches every output, so that backward runs as on the other ranks."""
    with_grad = [out for out in tensors_of(outputs) if out.requires_grad]
    # a model's own loss is a number, which is no number where it is a mean over nothing
    reached = [out for out in with_grad if out.dim() or out.isfinite()] or with_grad
    zeros = [out.sum() * 0 for out in reached]
    return torch.stack(zeros).sum() if zeros else torch.zeros((), requires_grad=True)


def _require_grad(inputs: Tree, outputs: Tree) -> Tree:
    """Outputs that were computed without a graph, marked as if there was one."""
    input_ids = {id(t) for t in tensors_of(inputs)}

    def mark(tensor: Tensor) -> Tensor:
        if id(tensor) in input_ids or not tensor.is_floating_point():
            return tensor
        return tensor.detach().requires_grad_()

    return map_tensors(mark, outputs)
