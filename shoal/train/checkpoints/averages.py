"""An exponential moving average of the weights, kept as the strategy keeps the weights.

A worker averages what it holds: all parameters, its shard (zero(3)), or its slices (tp). So an
average takes as much memory as the weights do, and an update sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from shoal.errors import BadInput, NotBuilt
from shoal.replica.compiled import uncompiled
from shoal.replica.fsdp.sharded_params import ShardedParams
from shoal.train.checkpoints.optimizer_state import copy_into
from shoal.train.checkpoints.state import gather_model
from shoal.train.step.step import Step


class Ema:
    """The average of the trained parameters of one model; `job.ema` makes it.

    ema.update()             after optimizer.step()
    with ema.applied():      the model has the averaged weights: evaluate it, save it
    """

    def __init__(self, model: nn.Module, decay: float, steps: Sequence[Step]):
        if not 0 <= decay < 1:
            raise BadInput(f"the decay of job.ema has to be at least 0 and below 1, not {decay}")
        self.model = model = uncompiled(model)[0]
        self.decay = decay
        self.steps = [step for step in steps if step.model is model]
        if not self.steps:
            raise BadInput("job.ema takes a model that job.setup or job.step was given before")
        for step in self.steps:
            if step.term.is_elastic and isinstance(step.flat, ShardedParams):
                raise NotBuilt(
                    f"job.ema is not built for {step.term}, whose workers hold other shards when "
                    "one is lost: take zero(2, elastic=True)"
                )
            if step.sync.undo_steps:
                raise NotBuilt(
                    f"job.ema is not built for {step.term}, whose steps are done again when a "
                    "worker is lost: take ddp(elastic=True)"
                )
            is_shared = step.term.has_servers and not step.is_own_loop
            if is_shared or not step.sync.synchronous:
                raise BadInput(
                    f"job.ema needs weights that are this worker's own after every step, and under "
                    f"{step.term} they are not: take ddp, zero, tp, or ps with job.setup"
                )
        self.averages = [weights.clone() for weights in self._weights()]

    @torch.no_grad()
    def update(self) -> None:
        """average = decay · average + (1 - decay) · weights"""
        for average, weights in zip(self.averages, self._weights(), strict=True):
            average.lerp_(weights, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While the block runs, the model has the averaged weights. All ranks enter it."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def gather(self, is_saved_here: bool) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The whole averaged model, and tied names, where it is saved. All ranks call it."""
        with self.applied(), ExitStack() as stack:
            for step in self.steps:
                stack.enter_context(step.sync.full_weights())
            return gather_model(self.steps[0]) if is_saved_here else ({}, {})

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take what `fit_others` returned."""
        with self.applied():
            copy_into(self.model, tensors)

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, weights in zip(self.averages, self._weights(), strict=True):
            before = weights.clone()
            weights.copy_(average)
            average.copy_(before)
        for step in self.steps:
            step.flat.reshard()

    def _weights(self) -> list[Tensor]:
        """What this worker holds of the parameters, as flat buffers."""
        return [
            step.flat.shard_data if isinstance(step.flat, ShardedParams) else step.flat.data
            for step in self.steps
        ]
