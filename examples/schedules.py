"""Schedules of one's own: proven and drawn by the commands, and trained with after the proof.

shoal collectives show broadcast examples/schedules.py:two_hops --ranks 3 --prove
shoal pipeline show examples/schedules.py:zigzag --stages 2
shoal run -n 2 -s 'pp(2, schedule="examples/schedules.py:zigzag")' digits
"""

from __future__ import annotations

from shoal.schedules.collectives import Collective, Transfer
from shoal.schedules.pipelines import Action, ActionKind


def two_hops(ranks: int) -> Collective:
    """A broadcast by way of rank 1, for three ranks."""
    first = (Transfer(0, 1, chunk=0, reduce=False),)
    second = (Transfer(1, 2, chunk=0, reduce=False),)
    return Collective("two_hops", ranks, 1, (first, second), kind="broadcast")


def zigzag(stages: int, stage: int, microbatches: int) -> list[Action]:
    """All forwards, then all backwards in the opposite order."""
    forward = [Action(ActionKind.FORWARD, m) for m in range(microbatches)]
    backward = [Action(ActionKind.BACKWARD, m) for m in reversed(range(microbatches))]
    return forward + backward
