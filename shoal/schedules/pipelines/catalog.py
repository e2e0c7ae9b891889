"""Every pipeline schedule by the name that `pp(n, schedule=…)` knows it by, or the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from shoal.errors import BadInput, CheckFailed
from shoal.runtime.wording import nearest
from shoal.schedules.pipelines import Action, Pipeline, check_sizes
from shoal.schedules.pipelines import one_f_one_b as made
from shoal.schedules.pipelines.proof import prove
from shoal.schedules.user import is_user_function, load_pipeline

DEFAULT_CHUNKS = 2


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule. `looped`: a stage has several chunks, and `make` takes their number."""

    name: str
    make: Callable[..., list[Action]]
    looped: bool = False
    default_chunks: int = 1

    @property
    def description(self) -> str:
        return inspect.getdoc(self.make) or ""

    def num_chunks(self, chunks: int | None) -> int:
        """The chunks of a stage: those given, or the default."""
        if (chunks or 1) > 1 and not self.looped:
            looped = " and ".join(one.name for one in CATALOG.values() if one.looped)
            raise BadInput(f"{self.name} has one chunk a stage, not {chunks}: {looped} take chunks")
        return self.default_chunks if chunks is None else chunks


CATALOG: dict[str, PipelineSchedule] = {
    entry.name: entry
    for entry in (
        PipelineSchedule("inter-op", made.inter_op),
        PipelineSchedule("gpipe", made.gpipe),
        PipelineSchedule("1f1b", made.one_f_one_b),
        PipelineSchedule("interleaved", made.interleaved, True, DEFAULT_CHUNKS),
        PipelineSchedule("zb-h1", made.zb_h1),
        PipelineSchedule("zb-h2", made.zb_h2),
        PipelineSchedule("bfs", made.bfs, True, DEFAULT_CHUNKS),
    )
}


def schedule(name: str) -> PipelineSchedule:
    """The schedule of this name; FILE.py:FUNCTION loads the user's own."""
    if name in CATALOG:
        return CATALOG[name]
    if is_user_function(name):
        return _of_user(name)
    raise BadInput(f"there is no pipeline schedule {name!r}; {nearest(name, CATALOG)}")


def build(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Pipeline:
    """The schedule of all stages; a user's own is proven. Looped ones have 2 chunks by default."""
    entry = schedule(name)
    chunks = entry.num_chunks(chunks)
    check_sizes(stages, microbatches, chunks)
    more = (chunks,) if entry.looped else ()
    actions = [entry.make(stages, stage, microbatches, *more) for stage in range(stages)]
    pipeline = Pipeline(entry.name, microbatches, chunks, actions)
    if is_user_function(name):
        prove(pipeline)
    return pipeline


def proven_pipeline(
    name: str, stages: int, microbatches: int, chunks: int | None = None
) -> Pipeline:
    """The schedule of FILE.py:FUNCTION; one that the proof rejects is a `BadInput`."""
    try:
        return build(name, stages, microbatches, chunks)
    except CheckFailed as error:
        raise BadInput(f"{name} cannot be used: {error}") from error


def _of_user(name: str) -> PipelineSchedule:
    """A function of four numbers takes chunks; the default of the fourth is their number."""
    make = load_pipeline(name)
    by_position = [
        parameter
        for parameter in inspect.signature(make).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    looped = len(by_position) > 3
    given = by_position[3].default if looped else 1
    chunks = given if isinstance(given, int) else DEFAULT_CHUNKS
    return PipelineSchedule(name.rpartition(":")[2], make, looped, chunks)
