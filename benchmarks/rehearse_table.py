"""Time to loss of strategies on clusters, rehearsed: by strategy, workers and cluster.

A cell is one rehearsal. It is written to a file as soon as it is there, so that the table can be
made in several sittings: cells of the file are not rehearsed again.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks.harness import say
from benchmarks.rehearse_script import train
from shoal.cluster import Cluster
from shoal.cluster.units import show_seconds
from shoal.commands.launching import command_for
from shoal.commands.subject import Subject, named_cluster, workload_of_command
from shoal.errors import BadInput, ShoalError
from shoal.observe.comparison import ComparedRun, outcome_from
from shoal.rehearse.pace import step_times, uneven_of
from shoal.rehearse.world import RehearsalSpec, rehearse
from shoal.runtime.tables import plain_table
from shoal.strategy.strategy import as_strategy

SCRIPT = str(Path(__file__).with_name("rehearse_script.py"))
UNTIL = 1.0
WORKERS = (4, 16, 64, 256)
STRATEGIES = (
    "ddp",
    'ddp(compress="int8")',
    "ps",
    "ps(quorum=0.75)",
    "ps(staleness=2)",
    'ps(mode="async")',
    'gossip(graph="ring")',
    "localsgd(every=8)",
    'localsgd(every=8, outer="nesterov(lr=0.7)")',
    'localsgd(every=8, outer="nesterov(lr=0.7)", overlap=True, delay=2)',
)
FOLDER = Path(__file__).parent / "clusters"


class Place(NamedTuple):
    """A cluster, and how many times slower its last worker is."""

    cluster: Cluster
    slow: dict[int, float]


def place(name: str, workers: int) -> Place:
    """The file benchmarks/clusters/NAME.toml; two sites have half of the workers each."""
    text = (FOLDER / f"{name}.toml").read_text()
    if name == "two-sites":
        text = text.replace("devices = 2", f"devices = {workers // 2}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.toml"
        file.write_text(text)
        cluster = named_cluster(file)
    return Place(cluster, {workers - 1: 4.0} if name == "racks" else {})


CLUSTERS = ("one-rack", "racks", "two-sites")


def run(
    file: Path,
    clusters: Sequence[str],
    workers: Sequence[int],
    strategies: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """The cells, those of the file first read from there."""
    known = {_key(cell): cell for cell in read(file)}
    subject: Subject | None = None
    for n in workers:
        for name in clusters:
            for strategy in strategies:
                asked = {"cluster": name, "workers": n, "strategy": strategy}
                if _key(asked) in known:
                    yield known[_key(asked)]
                    continue
                subject = subject or workload_of_command(command_for(SCRIPT, ()))
                say(f"{name}, {n} workers, {strategy}")
                cell = asked | _rehearse(subject, place(name, n), n, strategy)
                with file.open("a") as lines:
                    lines.write(json.dumps(cell) + "\n")
                yield cell


def read(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def _key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[name] for name in ("cluster", "workers", "strategy"))


def _rehearse(subject: Subject, at: Place, workers: int, strategy: str) -> dict[str, Any]:
    value = as_strategy(strategy)
    cluster = at.cluster
    began_s, cpu_s = time.monotonic(), time.process_time()
    try:
        times = step_times(subject.workload, cluster, value, workers, subject.batch)
        uneven = uneven_of(cluster.of_size(workers), at.slow, None, 0)
        spec = RehearsalSpec(value, workers, cluster, times, uneven)
        done = rehearse(train, spec)
    except BadInput as error:
        return {"refused": str(error)}
    except ShoalError as error:
        return {"failed": str(error)}
    run_ = ComparedRun(0, strategy, workers, "")
    found = outcome_from(run_, done.reports, done.spans, None, (), UNTIL)
    return {
        "until": UNTIL,
        "until_s": found.until_s,
        "until_steps": found.until_steps,
        "seconds": done.seconds,
        "loss": found.loss,
        "training_loss": found.training_loss,
        "waiting": found.waiting,
        "staleness": found.staleness,
        "dropped": found.dropped,
        "link_bytes": max(done.link_bytes.values(), default=0.0),
        "wall_s": time.monotonic() - began_s,
        "cpu_s": time.process_time() - cpu_s,
    }


def table_of(cells: Sequence[dict[str, Any]], cluster: str, workers: Sequence[int]) -> Table:
    """Seconds to the loss, by strategy and number of workers; "-": not within these steps."""
    found = {(c["strategy"], c["workers"]): c for c in cells if c["cluster"] == cluster}
    rows = [
        [strategy, *(_shown(found.get((strategy, n))) for n in workers)]
        for strategy in dict.fromkeys(strategy for strategy, _ in found)
    ]
    return plain_table(cluster, ["strategy", *(f"n = {n}" for n in workers)], rows, left=1)


def _shown(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not run"
    if "refused" in cell or "failed" in cell:
        return "refused" if "refused" in cell else "failed"
    until_s = cell["until_s"]
    return f"- ({cell['loss']:.2f})" if until_s is None else show_seconds(until_s)
