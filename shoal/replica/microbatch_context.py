"""What one forward and backward runs on, and around it: random streams, autocast, modes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.replica.host_streams import host_streams, restore_torch, save_torch

Precision = Literal["fp32", "bf16", "fp16"]
Loss = Callable[[Any, Any], Tensor]
# one trace by torch.fx at a time; and no thread sets a global random generator meanwhile, since a
# trace looks at their states to see whether the forward draws numbers
tracing = threading.RLock()
_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MicroBatch(NamedTuple):
    """Rows of one forward and backward.

    `weight` is their fraction of the global batch's loss, or a function that is called for it
    after forward, so that ranks can count together in the meantime.
    """

    inputs: Any
    targets: Any
    weight: float | Callable[[], Tensor]
    real: bool = True  # False: one row stands in for an empty micro-batch
    weightless: bool = False  # the loss has nothing to be a mean over
    skip: bool = False  # no rank has rows here: nothing is computed
    seed: int = 0


class ModuleCall(NamedTuple):
    """How a module is called."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    args, kwargs = call_arguments(inputs)
    return model(*args, **kwargs)


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tuple is spread over the positional arguments, a dict over the named ones."""
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


@contextmanager
def preserve_modes(model: nn.Module) -> Iterator[None]:
    """Restore the mode of every module afterwards: training or evaluating."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


Quiet = Callable[[nn.Module], Any]  # makes a forward repeatable


def evaluate_leaves(model: nn.Module) -> None:
    """Dropout and norms as in evaluation, where a model itself returns losses only in training."""
    for module in model.modules():
        if next(module.children(), None) is None:
            module.eval()


@contextmanager
def fork_rng(device: torch.device) -> Iterator[None]:
    """Restore the global random generators afterwards.

    A step draws from streams of its own (dropout), seeded per micro-batch. What the script draws
    between steps is then the same on every rank and at any number of them.
    """
    with tracing:
        of_host = host_streams.save()
        of_torch = save_torch()
        # of a GPU's generator, without tensors of states
        on_device = [(g, g.initial_seed(), g.get_offset()) for g in _of_device(device)]
    try:
        yield
    finally:
        with tracing:
            host_streams.restore(of_host)
            restore_torch(of_torch)
            for generator, seed, offset in on_device:
                generator.manual_seed(seed)
                generator.set_offset(offset)


def default_generators(device: torch.device) -> list[torch.Generator]:
    """The global generators that operations on `device` draw from."""
    return [torch.default_generator, *_of_device(device)]


def _of_device(device: torch.device) -> tuple[torch.Generator, ...]:
    if device.type != "cuda":
        return ()
    index = torch.cuda.current_device() if device.index is None else device.index
    return (torch.cuda.default_generators[index],)


def get_generators(device: torch.device) -> list[Tensor]:
    """Their states, one thread at a time.

    torch holds a generator's mutex while it makes the tensor of a state, which may collect garbage
    and wait for the GIL; a thread with the GIL that waits for that mutex would never go on.
    """
    with tracing:
        return [generator.get_state() for generator in default_generators(device)]


def set_generators(device: torch.device, states: Sequence[Tensor]) -> None:
    with tracing:
        for generator, state in zip(default_generators(device), states, strict=True):
            generator.set_state(state)


def seed_generators(device: torch.device, seed: int) -> None:
    with tracing:
        for generator in default_generators(device):
            generator.manual_seed(seed)


def seed_forward(device: torch.device, seed: int) -> None:
    """Seed all that a forward may draw from: torch, numpy and Python's `random`."""
    with tracing:
        seed_generators(device, seed)
        host_streams.seed(seed)


def autocast_for(
    device: torch.device, precision: Precision
) -> Callable[[], AbstractContextManager[Any]]:
    """A context for every forward; `BadInput` where the device cannot compute so."""
    if precision == "fp32":
        return nullcontext
    if precision not in _AUTOCAST_DTYPES:
        raise BadInput(f"precision is one of fp32, bf16, fp16, not {precision!r}")
    if precision == "fp16" and device.type != "cuda":
        raise BadInput('precision="fp16" needs a CUDA GPU; on a CPU take "bf16"')
    return lambda: torch.autocast(device.type, dtype=_AUTOCAST_DTYPES[precision])


@dataclass
class TensorParallelRng:
    """Between a column and a row layer every rank draws from a stream of its own.

    There the ranks have different features, or different rows. Behind it all of them continue
    with the stream that they had in common.
    """

    rank: int
    active: bool  # whether anything in the model is random
    _common_states: list[Tensor] | None = field(default=None, init=False)

    def fork(self, x: Tensor) -> None:
        """This rank draws from its own stream now; of several column layers the first forks."""
        if self.active and self._common_states is None:
            self._fork(x)

    def restore(self, x: Tensor) -> None:
        """From now on all ranks draw from the common stream."""
        if self._common_states is not None:
            set_generators(x.device, self._common_states)
            self._common_states = None

    @contextmanager
    def forked(self, x: Tensor) -> Iterator[None]:
        """For one operation."""
        if self._common_states is not None:  # forked already
            yield
            return
        self._fork(x)
        try:
            yield
        finally:
            self.restore(x)

    def _fork(self, x: Tensor) -> None:
        seed = int(torch.randint(1 << 62, ()))
        self._common_states = get_generators(x.device)
        seed_generators(x.device, seed + self.rank)


def as_autocast_does(x: Tensor) -> Tensor:
    """Cast for a matrix product, where autocast is on."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
