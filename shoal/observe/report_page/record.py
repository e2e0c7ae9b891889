"""The folder of `shoal run --record`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.cluster import Cluster
from shoal.cluster.toml_file import parse_cluster
from shoal.errors import BadInput
from shoal.observe.report_page.own_schedules import OwnSchedules
from shoal.observe.time_shares import TimeShares, all_shares
from shoal.runtime import trace
from shoal.runtime.decoders import convert
from shoal.runtime.run_dir import RECORDED_REPORT, RECORDED_TRACE, read
from shoal.runtime.trace import Process, Span, Trace
from shoal.strategy.strategy import Strategy, recorded

_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class RecordedRun:
    """One run; what its report lacks is left out of the page."""

    name: str
    report: dict[str, Any]
    spans: Trace

    @classmethod
    def read(cls, folder: Path) -> RecordedRun:
        """BadInput where it is not the folder of a recorded run."""
        missing = [
            name for name in (RECORDED_TRACE, RECORDED_REPORT) if not (folder / name).is_file()
        ]
        if missing:
            raise BadInput(
                f"{folder} is no recorded run: it has no {' and no '.join(missing)}; "
                "shoal run … --record DIR makes one"
            )
        report = read(folder / RECORDED_REPORT, _MAX_BYTES)
        if not isinstance(report, dict) or not isinstance(report.get("ranks"), list):
            raise BadInput(f"{folder / RECORDED_REPORT} is no report of shoal run --record")
        run = cls(folder.resolve().name, report, trace.from_chrome(folder / RECORDED_TRACE))
        try:
            _ = run.replicas
        except (BadInput, KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadInput(
                f"{folder / RECORDED_REPORT} is no report of shoal run: {error}"
            ) from error
        return run

    @property
    def workers(self) -> int:
        return int(self.report["workers"])

    @cached_property
    def named(self) -> Strategy:
        """The strategy as the record has it: only `strategy` may be built from."""
        return recorded(str(self.report["strategy"]))

    @cached_property
    def strategy(self) -> Strategy:
        """Names no file; what its files held is in `own`."""
        return self.named.without_files()

    @cached_property
    def own(self) -> OwnSchedules:
        return convert(self.report.get("schedules", {}), OwnSchedules)

    @cached_property
    def replicas(self) -> int:
        return self.strategy.division(self.workers).replicas

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """The reports of the workers that were there to the end."""
        return [rank for rank in self.report["ranks"] if isinstance(rank, dict)]

    @cached_property
    def shares(self) -> dict[Process, TimeShares]:
        return all_shares(self.spans)

    @cached_property
    def cluster(self) -> Cluster | None:
        text = self.report.get("cluster")
        if text is None:
            return None
        return parse_cluster(str(text), f"{self.name}: cluster", "").of_size(self.workers)

    @cached_property
    def training(self) -> tuple[int, int]:
        """From the first step of all ranks to the last, in ns; of everything without steps."""
        everything = [span for spans in self.spans.values() for span in spans]
        steps = [span for span in everything if span.kind in trace.TRAINING] or everything
        if not steps:
            return 0, 0
        return min(s.start_ns for s in steps), max(s.end_ns for s in steps)

    def syncs(self, key: str) -> list[tuple[int, Any]]:
        """What ranks report under a key of `sync`, of the first model that has it."""
        found = []
        for rank in self.ranks:
            known = [one[key] for one in rank.get("sync") or [] if one.get(key)]
            found += [(int(rank["rank"]), known[0])] if known else []
        return found

    def trained(self, process: Process) -> list[Span]:
        """The spans of a process while ranks train."""
        first, last = self.training
        return [s for s in self.spans[process] if first <= s.start_ns and s.end_ns <= last]
