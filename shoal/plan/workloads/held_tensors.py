"""Which tensors of a traced model one worker holds, and how large they are there."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from shoal.plan.workloads.workload import HeldTensor, Split, StageTensors


def stage_tensors(
    held: Iterable[HeldTensor], layers: Collection[int], split: Split
) -> StageTensors:
    """Of these layers; a tensor that several of them use is there once."""
    here = {tensor.name: tensor for tensor in held if tensor.layer in layers}
    trained = [tensor for tensor in here.values() if tensor.is_trained and 0 not in tensor.shape]
    others = [math.prod(tensor.shape) for tensor in here.values() if not tensor.is_trained]
    units: dict[int, list[int]] = {0: []}
    for place, tensor in enumerate(trained):
        units.setdefault(tensor.unit, []).append(place)
    return StageTensors(
        tuple(_shape(tensor, split) for tensor in trained),
        tuple(tuple(units[unit]) for unit in sorted(units)),
        float(sum(others)),
    )


def _shape(tensor: HeldTensor, split: Split) -> tuple[int, ...]:
    """Its part on one worker. Which dimension is divided does not matter here."""
    parts = (split.tp if tensor.is_divided else 1) * (split.ep if tensor.is_expert else 1)
    first, *others = tensor.shape or (1,)
    return (max(1, -(-first // parts)), *others)
