"""Layers dealt to the stages of a pipeline, and how many micro-batches a stage keeps.

Layers come as runs of equal ones. A stage is how many layers it has of every run; with `chunks` a
device has that many virtual stages, dealt round: device i has stages i, i + p, i + 2p, …
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

Stage = tuple[int, ...]  # layers of each run


def deal_layers(counts: Sequence[int], weights: Sequence[float], stages: int) -> list[Stage]:
    """Contiguous layers for every stage, so that the largest weight of a stage is the smallest."""
    even = _deal_shares(counts, weights, stages)
    largest = max(weight_of(stage, weights) for stage in even)
    better = _fill(counts, weights, stages, largest * (1 - 1e-6))
    if better is None:
        return even
    return _fill(counts, weights, stages, _smallest_limit(counts, weights, stages)) or better


def deal_evenly(counts: Sequence[int], stages: int) -> list[Stage]:
    """The longest run in equal parts; the first stage has what is before it, the last the rest."""
    longest = max(range(len(counts)), key=lambda run: (counts[run], -run))
    dealt = []
    for stage in range(stages):
        share, more = divmod(counts[longest], stages)
        own = [0] * len(counts)
        own[longest] = share + (stage < more)
        if stage == 0:
            own[:longest] = counts[:longest]
        if stage == stages - 1:
            own[longest + 1 :] = counts[longest + 1 :]
        dealt.append(tuple(own))
    return dealt


def by_device(virtual: Sequence[Stage], devices: int) -> list[Stage]:
    """The layers of each device's virtual stages together."""
    return [
        tuple(map(sum, zip(*virtual[device::devices], strict=True))) for device in range(devices)
    ]


def weight_of(stage: Stage, weights: Sequence[float]) -> float:
    return sum(number * weight for number, weight in zip(stage, weights, strict=True) if number)


def weights_of(stages: Sequence[Stage], weights: Sequence[float]) -> list[float]:
    """Of every stage; most stages have the same layers."""
    known = {stage: weight_of(stage, weights) for stage in set(stages)}
    return [known[stage] for stage in stages]


@lru_cache(maxsize=10_000)
def in_flight(schedule: str, stages: int, microbatches: int, chunks: int) -> tuple[float, ...]:
    """The most micro-batches that every stage keeps activations of; parts of one are chunks."""
    if schedule in ("1f1b", "zb-h1", "zb-h2", "inter-op"):
        kept = (_kept_by(schedule, stages, stage) for stage in range(stages))
        return tuple(float(min(microbatches, number)) for number in kept)
    if schedule == "interleaved":
        peaks = [(stages - stage - 1) * 2 + (chunks - 1) * stages + 1 for stage in range(stages)]
        return tuple(min(microbatches * chunks, peak) / chunks for peak in peaks)
    return (float(microbatches),) * stages  # gpipe, bfs, and what is not known


def _kept_by(schedule: str, stages: int, stage: int) -> int:
    kept = {"1f1b": stages - stage, "zb-h1": stages, "zb-h2": 2 * stages - 1, "inter-op": 1}
    return kept[schedule]


def _deal_shares(counts: Sequence[int], weights: Sequence[float], stages: int) -> list[Stage]:
    """Each stage is filled up to the even share of what is left."""
    left = weight_of(tuple(counts), weights)
    waiting = list(counts)
    dealt = []
    for stage in range(stages):
        share = left / (stages - stage)
        taken = _take(waiting, weights, share, 0.5, last=stage == stages - 1)
        left -= weight_of(taken, weights)
        dealt.append(taken)
    return dealt


def _take(
    waiting: list[int], weights: Sequence[float], room: float, rounding: float, last: bool = False
) -> Stage:
    """Take layers from the front of those that wait, as many as there is room for."""
    taken = [0] * len(waiting)
    for run, weight in enumerate(weights):
        if not waiting[run]:
            continue
        number = waiting[run] if last or not weight else int(room / weight + rounding)
        number = max(0, min(waiting[run], number))
        taken[run] = number
        waiting[run] -= number
        room -= number * weight
        if waiting[run]:
            break
    return tuple(taken)


def _fill(
    counts: Sequence[int], weights: Sequence[float], stages: int, limit: float
) -> list[Stage] | None:
    """Stages filled up to a limit, from the front; None where layers are left over."""
    waiting = list(counts)
    dealt = [_take(waiting, weights, limit, 1e-9) for _ in range(stages)]
    return None if any(waiting) else dealt


def _smallest_limit(counts: Sequence[int], weights: Sequence[float], stages: int) -> float:
    total = weight_of(tuple(counts), weights)
    low = total / stages
    high = low + max(weights)
    for _ in range(30):
        middle = (low + high) / 2
        if _fill(counts, weights, stages, middle) is None:
            low = middle
        else:
            high = middle
    return high
