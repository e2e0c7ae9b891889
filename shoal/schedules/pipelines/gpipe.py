"""Schedules that finish all forwards of a chunk before its backwards: breadth first."""

from __future__ import annotations

from shoal.schedules.pipelines.actions import Action, ActionKind


def inter_op(stages: int, stage: int, microbatches: int) -> list[Action]:
    """No pipeline: one micro-batch at a time through all p stages.

    Inter-operator parallelism by itself. One stage works while the others wait: a bubble of
    (p-1)/p. One set of activations lives.
    """
    return [
        Action(kind, microbatch)
        for microbatch in range(microbatches)
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
    ]


def gpipe(stages: int, stage: int, microbatches: int) -> list[Action]:
    """GPipe: all m forwards, then all m backwards.

    A bubble of (p-1)/(m+p-1); every stage holds the activations of all m micro-batches.
    """
    return bfs(stages, stage, microbatches, 1)


def bfs(stages: int, stage: int, microbatches: int, chunks: int) -> list[Action]:
    """Looped breadth-first: all m micro-batches chunk by chunk.

    Forward through all v chunks, then backward. With m >= p a bubble of (p-1)/(vm+p-1); a
    stage holds the activations of all m micro-batches in all its chunks.
    """
    forward = [
        Action(ActionKind.FORWARD, microbatch, chunk)
        for chunk in range(chunks)
        for microbatch in range(microbatches)
    ]
    backward = [
        Action(ActionKind.BACKWARD, microbatch, chunk)
        for chunk in reversed(range(chunks))
        for microbatch in range(microbatches)
    ]
    return forward + backward
