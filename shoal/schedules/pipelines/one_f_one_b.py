"""Schedules that go backward as early as they can, so that few activations live."""

from __future__ import annotations

from itertools import pairwise

from shoal.schedules.pipelines.actions import Action, ActionKind


def one_f_one_b(stages: int, stage: int, microbatches: int) -> list[Action]:
    """1F1B: after p-s-1 forwards, one forward and backward in turn.

    The bubble of GPipe, (p-1)/(m+p-1); stage s holds the activations of at most p-s micro-batches.
    """
    forward = [Action(ActionKind.FORWARD, microbatch) for microbatch in range(microbatches)]
    backward = [Action(ActionKind.BACKWARD, microbatch) for microbatch in range(microbatches)]
    return in_turn(forward, backward, warm_up=stages - stage - 1)


def interleaved(stages: int, stage: int, microbatches: int, chunks: int) -> list[Action]:
    """1F1B over v chunks a stage, p micro-batches through each.

    With m a multiple of p a bubble of (p-1)/(vm+p-1), for v times the messages. Stage s warms up
    with 2(p-s-1) + (v-1)p forwards of a chunk. Where p does not divide m, there are m // p groups
    (at least one), as equal as can be and the larger ones first; the warm-up follows the largest.
    """
    groups = _groups(microbatches, max(1, microbatches // stages))
    forward = [
        Action(ActionKind.FORWARD, microbatch, chunk)
        for group in groups
        for chunk in range(chunks)
        for microbatch in group
    ]
    backward = [
        Action(ActionKind.BACKWARD, microbatch, chunk)
        for group in groups
        for chunk in reversed(range(chunks))
        for microbatch in group
    ]
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * len(groups[0])
    return in_turn(forward, backward, warm_up)


def in_turn(forward: list[Action], backward: list[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards; a forward and a backward in turn; the remaining backwards.

    The first backward comes after one more forward than `warm_up`, if there is one.
    """
    warm_up = min(warm_up, len(forward))
    steady = [action for pair in zip(forward[warm_up:], backward, strict=False) for action in pair]
    return forward[:warm_up] + steady + backward[len(forward) - warm_up :]


def _groups(microbatches: int, count: int) -> list[range]:
    """`count` runs of micro-batches, the larger ones first."""
    size, larger = divmod(microbatches, count)
    starts = [size * index + min(index, larger) for index in range(count + 1)]
    return [range(*ends) for ends in pairwise(starts)]
