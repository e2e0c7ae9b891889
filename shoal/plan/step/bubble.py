"""How long the slowest stage of a pipeline waits: closed forms of `timeline.simulate`.

gpipe, 1f1b        one micro-batch's way through the other stages
interleaved, bfs   1/chunks of it, where there is a micro-batch for every stage
zb-h1, zb-h2       the way without the weights' part W of backward. Later micro-batches fill it
                   with W or forward F, the shorter, up to p - 1 or 2(p - 1) of them:
                   (p-1)(F + B) - min(m - 1, p - 1) min(F, W)
inter-op           every micro-batch's way through the other stages
"""

from __future__ import annotations

from typing import NamedTuple


class StageTimes(NamedTuple):
    """Of one micro-batch."""

    others_s: float  # all of it in the stages but the slowest, together
    others_weight_s: float  # the part of that that makes gradients of weights
    forward_s: float  # in the slowest stage
    weight_s: float


def bubble_s(
    schedule: str, stages: int, microbatches: int, chunks: int, times: StageTimes
) -> float:
    if schedule == "inter-op":
        return microbatches * times.others_s
    if schedule.startswith("zb"):
        most = (1 if schedule == "zb-h1" else 2) * (stages - 1)
        filled = min(microbatches - 1, most) * min(times.forward_s, times.weight_s)
        return max(0.0, times.others_s - times.others_weight_s - filled)
    missing = max(0, stages - microbatches) / (stages - 1)  # stages without a micro-batch
    return times.others_s * (missing + (1 - missing) / chunks)
