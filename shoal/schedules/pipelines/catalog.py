"""Every pipeline schedule by the name that `pp(n, schedule=…)` knows it by, or the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from shoal.errors import BadInput
from shoal.runtime.wording import nearest
from shoal.schedules.pipelines.actions import (
    Action,
    LoopedSchedule,
    Pipeline,
    Schedule,
    check_sizes,
)
from shoal.schedules.pipelines.one_f_one_b import (
    bfs,
    gpipe,
    inter_op,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from shoal.schedules.pipelines.proof import prove
from shoal.schedules.user import is_user_function, load_pipeline

DEFAULT_CHUNKS = 2


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule. `looped`: a stage has several chunks, and `make` takes their number."""

    name: str
    make: Schedule | LoopedSchedule
    looped: bool = False
    default_chunks: int = 1

    @property
    def description(self) -> str:
        return inspect.getdoc(self.make) or ""

    def num_chunks(self, chunks: int | None) -> int:
        """The chunks of a stage: those given, or the default."""
        if chunks is None:
            return self.default_chunks
        if chunks > 1 and not self.looped:
            looped = " and ".join(one.name for one in CATALOG.values() if one.looped)
            raise BadInput(f"{self.name} has one chunk a stage, not {chunks}: {looped} take chunks")
        return chunks

    def actions(self, stages: int, stage: int, microbatches: int, chunks: int) -> list[Action]:
        """The actions of one stage; the numbers have been checked."""
        if self.looped:
            return cast(LoopedSchedule, self.make)(stages, stage, microbatches, chunks)
        return cast(Schedule, self.make)(stages, stage, microbatches)


def _looped(name: str, make: LoopedSchedule) -> PipelineSchedule:
    return PipelineSchedule(name, make, looped=True, default_chunks=DEFAULT_CHUNKS)


CATALOG: dict[str, PipelineSchedule] = {
    entry.name: entry
    for entry in (
        PipelineSchedule("inter-op", inter_op),
        PipelineSchedule("gpipe", gpipe),
        PipelineSchedule("1f1b", one_f_one_b),
        _looped("interleaved", interleaved),
        PipelineSchedule("zb-h1", zb_h1),
        PipelineSchedule("zb-h2", zb_h2),
        _looped("bfs", bfs),
    )
}


def schedules() -> list[str]:
    """The names of the schedules that Shoal has."""
    return list(CATALOG)


def schedule(name: str) -> PipelineSchedule:
    """The schedule of this name; FILE.py:FUNCTION loads the user's own."""
    if is_user_function(name):
        return _of_user(name)
    if name not in CATALOG:
        raise BadInput(f"there is no pipeline schedule {name!r}; {nearest(name, CATALOG)}")
    return CATALOG[name]


def build(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Pipeline:
    """The schedule of all stages; a user's own is proven. Looped ones have 2 chunks by default."""
    entry = schedule(name)
    chunks = entry.num_chunks(chunks)
    check_sizes(stages, microbatches, chunks)
    actions = [entry.actions(stages, stage, microbatches, chunks) for stage in range(stages)]
    pipeline = Pipeline(entry.name, microbatches, chunks, actions)
    if is_user_function(name):
        prove(pipeline)
    return pipeline


def _of_user(name: str) -> PipelineSchedule:
    make = load_pipeline(name)
    function_name = name.rpartition(":")[2]
    chunks = _chunks_of(make)
    return PipelineSchedule(function_name, make, chunks is not None, chunks or 1)


def _chunks_of(function: Callable[..., list[Action]]) -> int | None:
    """The default number of chunks; None if the function does not take a number of chunks."""
    by_position = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(by_position) < 4:
        return None
    default = by_position[3].default
    return default if isinstance(default, int) else DEFAULT_CHUNKS
