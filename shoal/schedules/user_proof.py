"""A user's schedules before they train: proven, and with a digest that workers compare."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from shoal.errors import BadInput, CheckFailed
from shoal.schedules.pipelines import Pipeline
from shoal.schedules.pipelines.catalog import build as build_pipeline

if TYPE_CHECKING:
    from shoal.schedules.collectives import Collective


def proven_collective(name: str, kind: str, ranks: int) -> Collective:
    """The schedule of FILE.py:FUNCTION; one that the proof rejects is a `BadInput`."""
    from shoal.schedules.collectives.catalog import build  # numpy: only if it is needed
    from shoal.schedules.collectives.proof import prove

    collective = build(kind, name, ranks)
    try:
        prove(collective)
    except CheckFailed as error:
        raise BadInput(f"{name} cannot be used: {error}") from error
    return collective


def proven_pipeline(
    name: str, stages: int, microbatches: int, chunks: int | None = None
) -> Pipeline:
    """The schedule of FILE.py:FUNCTION; one that the proof rejects is a `BadInput`."""
    try:
        return build_pipeline(name, stages, microbatches, chunks)
    except CheckFailed as error:
        raise BadInput(f"{name} cannot be used: {error}") from error


def digest(schedule: Collective | Pipeline) -> bytes:
    """Equal for equal schedules."""
    text = repr(schedule)
    if not isinstance(schedule, Pipeline):
        sizes = (schedule.kind, schedule.ranks, schedule.chunks, schedule.scratch)
        text = repr((sizes, schedule.root, [tuple(row) for row in schedule.rounds]))
    return hashlib.sha256(text.encode()).digest()
