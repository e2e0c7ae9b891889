"""The messages of a pipeline in one order, for stages that pass them on one after the other.

    1F1B, 2 stages, 3 micro-batches    0→1 F0   0→1 F1   1→0 B0   0→1 F2   1→0 B1   1→0 B2

Over NCCL a send lasts until its receiver has called, and the messages of a stage follow each
other. Stages that send before they receive then wait in a circle: here stage 0 sends F1 while
stage 1 sends B0. Where every stage keeps to one order of all messages, none can; it receives F1
before it sends B0, or both at once.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.schedules.pipelines import Action, ActionKind, Pipeline, VirtualStage


class StageMessage(NamedTuple):
    """What `target` needs from another stage for one micro-batch."""

    target: VirtualStage
    microbatch: int
    is_forward: bool


def message_for(stage: int, action: Action) -> StageMessage:
    """What an action of `stage` needs, if it has a producer."""
    is_forward = action.kind is ActionKind.FORWARD
    return StageMessage(VirtualStage(stage, action.chunk), action.microbatch, is_forward)


def message_from(pipeline: Pipeline, stage: int, action: Action) -> StageMessage | None:
    """What an action of `stage` sends, if it has a consumer."""
    target = pipeline.consumer(stage, action)
    is_forward = action.kind is ActionKind.FORWARD
    return None if target is None else StageMessage(target, action.microbatch, is_forward)


def message_order(pipeline: Pipeline) -> list[StageMessage]:
    """By rounds: in each every stage does its next action, if what it needs came before.

    So a message comes after all that was sent or received before it was computed.
    """
    order: list[StageMessage] = []
    arrived: set[StageMessage] = set()
    done = [0] * pipeline.stages
    total = sum(map(len, pipeline.actions))
    while sum(done) < total:
        sent = []
        for stage, actions in enumerate(pipeline.actions):
            action = actions[done[stage]] if done[stage] < len(actions) else None
            if action is None:
                continue
            needs = pipeline.producer(stage, action) is not None
            if needs and message_for(stage, action) not in arrived:
                continue
            done[stage] += 1
            message = message_from(pipeline, stage, action)
            if message is not None:
                sent.append(message)
        arrived.update(sent)
        order += sent
    return order
