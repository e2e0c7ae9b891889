"""Runs one replica's schedule: forward and backward of every micro-batch, and nothing else.

The engine knows no other replica. It says when a bucket of gradients is final (`on_bucket`),
and what its part of the loss is; agreeing with others is the business of the sync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.observe.trace import OFF, Tracer
from shoal.pytree import tensors_of
from shoal.replica.batchnorm import Presence
from shoal.replica.flat_params import FlatParams
from shoal.replica.grad_buckets import OnBucket
from shoal.schedules.pipelines.actions import Action, Kind

Precision = Literal["fp32", "bf16", "fp16"]
Loss = Callable[[Any, Any], Tensor]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MicroBatch(NamedTuple):
    """Rows of one forward and backward.

    `weight` is their share of the global batch's loss, or a function that is asked for it when
    forward is done, so that ranks can count together in the meantime.
    """

    inputs: Any
    targets: Any
    weight: float | Callable[[], Tensor]
    real: bool = True  # False: one row stands in for an empty part
    weightless: bool = False  # the loss has nothing to be a mean over
    skip: bool = False  # nobody has rows here: nothing is computed
    seed: int = 0


class Engine:
    """Interprets the actions of one stage on one model."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        flat: FlatParams,
        actions: Sequence[Action],
        *,
        precision: Precision = "fp32",
        every_microbatch: bool = False,
        gradient_scale: float = 1.0,
        loss_scale: Callable[[Tensor], Tensor] | None = None,
        presence: Presence | None = None,
        tracer: Tracer = OFF,
    ):
        self.model = model
        self.loss = loss
        self.flat = flat
        self.follow(actions)
        self.every_microbatch = every_microbatch
        self.loss_scale = loss_scale
        self.gradient_scale = gradient_scale
        self.presence = presence or Presence()
        self.tracer = tracer
        self._autocast = autocast_for(flat.device, precision)
        self._do = {Kind.FORWARD: self._forward, Kind.BACKWARD: self._backward}

    def follow(self, actions: Sequence[Action]) -> None:
        """Take these actions for the schedule from now on."""
        self.actions = actions
        self._last = max(action.microbatch for action in actions)

    def run(self, microbatches: Sequence[MicroBatch], on_bucket: OnBucket) -> Tensor:
        """One step's computing; returns the weighted loss of these rows.

        The same number stands in `flat.grads.header[0]` where gradients are exchanged, so that it
        travels with them.
        """
        self._microbatches = microbatches
        self._on_bucket = on_bucket
        self._losses: dict[int, Tensor] = {}
        self._total: Tensor | None = None
        with own_random_streams(self.flat.device):
            for action in self.actions:
                self._do[action.kind](action.microbatch)
        assert self._total is not None
        return self._total

    is_last = True  # the model's outputs and the loss are known here

    def share(self, value: Any) -> Any:
        """What is known where `is_last`, on every worker of the replica."""
        return value

    def predict(self, inputs: Any) -> Any:
        """What the model makes of the inputs, for `job.evaluate`."""
        return call(self.model, inputs)

    def _forward(self, m: int) -> None:
        micro = self._microbatches[m]
        if micro.skip:
            self._losses[m] = torch.zeros((), device=self.flat.device, requires_grad=True)
            return
        self.presence.real = micro.real
        for generator in generators_of(self.flat.device):
            generator.manual_seed(micro.seed)
        with self.tracer.span("forward", "micro-batch"), self._autocast():
            self._losses[m] = self._loss_of(call(self.model, micro.inputs), micro)

    def _loss_of(self, outputs: Any, micro: MicroBatch) -> Tensor:
        loss = _zero(outputs) if micro.weightless else self.loss(outputs, micro.targets)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise BadInput(
                "the loss function has to return one number, the mean over the samples, and it "
                f"returned {tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__}"
            )
        return loss

    def _backward(self, m: int) -> None:
        micro = self._microbatches[m]
        loss = self._losses.pop(m)
        start = self._start_of_backward(micro, loss)
        final = self.every_microbatch or m == self._last
        if final:
            self.flat.grads.arm(self._on_bucket)
        with self.tracer.span("backward", "micro-batch"):
            loss.backward(start)  # type: ignore[no-untyped-call]
            if final:
                self.flat.grads.flush()
                self.flat.rest()

    def _start_of_backward(self, micro: MicroBatch, loss: Tensor) -> Tensor | None:
        """The gradient of the global loss by this one: its weight. None stands for 1."""
        weight = micro.weight() if callable(micro.weight) else micro.weight
        plain = self.loss_scale is None and self.gradient_scale == 1.0
        if isinstance(weight, float) and weight == 1.0 and plain:
            self._note_loss(loss.detach())
            return None
        share = torch.as_tensor(weight, dtype=loss.dtype, device=loss.device)
        self._note_loss(loss.detach() * share)
        start = share * self.gradient_scale
        return start if self.loss_scale is None else self.loss_scale(start)

    def _note_loss(self, part: Tensor) -> None:
        """The head leaves with the last bucket, so it has to be right before backward starts."""
        if self._total is None or self.every_microbatch:
            self._total = part
        else:
            self._total = self._total + part
        self.flat.grads.record_loss(self._total)


def call(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = arguments_of(inputs)
    return model(*args, **kwargs)


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tuple is spread over the positional arguments, a dict over the named ones."""
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


@contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Every module is as it was afterwards: training or evaluating."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def own_random_streams(device: torch.device) -> Iterator[None]:
    """Give the global random generators back as they were found.

    A step draws from streams of its own (dropout), seeded per micro-batch; what the script draws
    between steps is then the same on every rank and at any number of them.
    """
    generators = generators_of(device)
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _zero(outputs: Any) -> Tensor:
    """A loss of 0 that reaches every output, so that backward runs as on the other ranks."""
    parts = [out.sum() * 0 for out in tensors_of(outputs) if out.requires_grad]
    return torch.stack(parts).sum() if parts else torch.zeros((), requires_grad=True)


def generators_of(device: torch.device) -> list[torch.Generator]:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return [torch.default_generator, torch.cuda.default_generators[index]]
    return [torch.default_generator]


def autocast_for(
    device: torch.device, precision: Precision
) -> Callable[[], AbstractContextManager[Any]]:
    if precision == "fp32":
        return nullcontext
    if precision not in _DTYPES:
        raise BadInput(f"precision is one of fp32, bf16, fp16, not {precision!r}")
    if precision == "fp16" and device.type != "cuda":
        raise BadInput('precision="fp16" needs a CUDA GPU; on a CPU take "bf16"')
    return lambda: torch.autocast(device.type, dtype=_DTYPES[precision])
