"""What one worker computes of a replica, and what it exchanges with the other stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.pytree import Tree
from shoal.replica.microbatch import MicroBatch, call_model, seed_forward
from shoal.schedules.pipelines.actions import Action


class Stage:
    """The only stage of a replica that is not pipelined: no messages.

    The stages of a pipeline override all of it.
    """

    is_last = True  # whether the model's outputs and the loss are known here

    def __init__(self, model: nn.Module, device: torch.device):
        self.model = model
        self._device = device

    def begin(self) -> None:
        return None

    def computes_loss(self, action: Action) -> bool:
        return True

    def recv_inputs(self, action: Action, micro: MicroBatch) -> Tree:
        return micro.inputs

    def compute(self, action: Action, micro: MicroBatch, inputs: Tree) -> Tree:
        seed_forward(self._device, micro.seed)
        return call_model(self.model, inputs)

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
        return call_model(self.model, inputs)
