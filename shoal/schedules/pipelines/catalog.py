"""Every pipeline schedule by the name that `pp(n, schedule=…)` knows it by."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import cast

from shoal.errors import BadInput
from shoal.schedules.pipelines.actions import (
    Action,
    LoopedSchedule,
    Pipeline,
    Schedule,
    check_sizes,
)
from shoal.schedules.pipelines.gpipe import bfs, gpipe, inter_op
from shoal.schedules.pipelines.one_f_one_b import interleaved, one_f_one_b
from shoal.schedules.pipelines.zero_bubble import zb_h1, zb_h2

DEFAULT_CHUNKS = 2


@dataclass(frozen=True)
class Entry:
    """A schedule. `looped`: a stage has several chunks, and `make` takes their number."""

    name: str
    make: Schedule | LoopedSchedule
    looped: bool = False

    @property
    def description(self) -> str:
        return inspect.getdoc(self.make) or ""

    def actions(self, stages: int, stage: int, microbatches: int, chunks: int) -> list[Action]:
        """What one stage does; the numbers have been checked."""
        if self.looped:
            return cast(LoopedSchedule, self.make)(stages, stage, microbatches, chunks)
        return cast(Schedule, self.make)(stages, stage, microbatches)


CATALOG: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("inter-op", inter_op),
        Entry("gpipe", gpipe),
        Entry("1f1b", one_f_one_b),
        Entry("interleaved", interleaved, looped=True),
        Entry("zb-h1", zb_h1),
        Entry("zb-h2", zb_h2),
        Entry("bfs", bfs, looped=True),
    )
}


def schedules() -> list[str]:
    return list(CATALOG)


def schedule(name: str) -> Entry:
    if name not in CATALOG:
        from shoal.schedules.collectives.kinds import nearest  # numpy: only where it is needed

        raise BadInput(f"there is no pipeline schedule {name!r}; {nearest(name, CATALOG)}")
    return CATALOG[name]


def build(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Pipeline:
    """The schedule of all stages. Without a word the looped ones have two chunks a stage."""
    entry = schedule(name)
    if chunks is None:
        chunks = DEFAULT_CHUNKS if entry.looped else 1
    check_sizes(stages, microbatches, chunks)
    if chunks > 1 and not entry.looped:
        looped = " and ".join(one.name for one in CATALOG.values() if one.looped)
        raise BadInput(f"{name} has one chunk a stage, not {chunks}: {looped} take chunks")
    actions = [entry.actions(stages, stage, microbatches, chunks) for stage in range(stages)]
    return Pipeline(name, microbatches, chunks, actions)
