"""A model cut into stages; a schedule is a list of actions for each of them.

1F1B, 2 stages, 4 micro-batches          F forward, B backward
stage 0   F0 F1 B0 F2 B1 F3 B2 B3        at most `stages - stage` micro-batches are held
stage 1      F0 B0 F1 B1 F2 B2 F3 B3
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from examples.core.world import World


class Action(NamedTuple):
    is_forward: bool
    micro_batch: int


def one_f_one_b(stages: int, stage: int, micro_batches: int) -> list[Action]:
    """For real: shoal/schedules/pipelines/."""
    warm_up = min(stages - stage - 1, micro_batches)
    actions = [Action(True, index) for index in range(warm_up)]
    for index in range(micro_batches):
        if warm_up + index < micro_batches:
            actions.append(Action(True, warm_up + index))
        actions.append(Action(False, index))
    return actions


def run_stage(
    world: World,
    stage: int,
    part: nn.Module,
    micro_batches: list[tuple[Tensor, Tensor]],
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> float:
    """One step's passes of a stage; its gradients are summed over micro-batches.

    Returns the loss, which the last stage knows. For real: shoal/replica/engine.py.
    """
    is_last = stage == world.size - 1
    held: dict[int, tuple[Tensor, Tensor]] = {}  # what came in and what went out, until backward
    loss = 0.0
    for action in one_f_one_b(world.size, stage, len(micro_batches)):
        inputs, targets = micro_batches[action.micro_batch]
        if action.is_forward:
            if stage > 0:
                inputs = world.receive(stage - 1, stage).requires_grad_()
            outputs = part(inputs)
            if is_last:
                outputs = loss_of(outputs, targets)
                loss += outputs.item()
            else:
                world.send(stage, stage + 1, outputs.detach())
            held[action.micro_batch] = (inputs, outputs)
        else:
            inputs, outputs = held.pop(action.micro_batch)
            outputs.backward(None if is_last else world.receive(stage + 1, stage))
            if stage > 0:
                world.send(stage, stage - 1, inputs.grad)
    return loss
