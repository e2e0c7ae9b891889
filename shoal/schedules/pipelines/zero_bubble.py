"""Zero-bubble schedules: the backward is split, and gradients of weights fill the bubble.

After Qi et al., "Zero Bubble Pipeline Parallelism": I, the gradient of the input, is what the
stage before waits for; W, that of the weights, can run at any later time.
"""

from __future__ import annotations

from shoal.schedules.pipelines.actions import Action, ActionKind
from shoal.schedules.pipelines.one_f_one_b import in_turn


def zb_h1(stages: int, stage: int, microbatches: int) -> list[Action]:
    """1F1B with a split backward; s weight gradients may wait.

    With m >= p, and F, I and W equally long, a bubble of (p-1)/(3m+p-1), about a third of that of
    1F1B. No stage holds more than p micro-batches, as many as the first stage of 1F1B.
    """
    return _split(stages, stage, microbatches, depth=1)


def zb_h2(stages: int, stage: int, microbatches: int) -> list[Action]:
    """Twice the warm-up of ZB-H1; 2s weight gradients may wait.

    With m >= 2p-1, and F, I and W equally long, no bubble inside a stage, for the activations of up
    to 2p-1 micro-batches. Stages begin and end one after the other, so it pays where the next step
    begins without a barrier.
    """
    return _split(stages, stage, microbatches, depth=2)


def _split(stages: int, stage: int, microbatches: int, depth: int) -> list[Action]:
    """1F1B order of F and I; after an I one W, if more than `depth * stage` wait; then the rest."""
    forward = [Action(ActionKind.FORWARD, microbatch) for microbatch in range(microbatches)]
    inputs = [Action(ActionKind.INPUT, microbatch) for microbatch in range(microbatches)]
    actions = []
    for action in in_turn(forward, inputs, warm_up=depth * (stages - stage - 1)):
        actions.append(action)
        if action.kind is ActionKind.INPUT and action.microbatch >= depth * stage:
            actions.append(Action(ActionKind.WEIGHT, action.microbatch - depth * stage))
    waiting = range(max(0, microbatches - depth * stage), microbatches)
    return actions + [Action(ActionKind.WEIGHT, microbatch) for microbatch in waiting]
