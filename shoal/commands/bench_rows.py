"""How `shoal bench rows` starts its workers and servers, and compares what they measure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from shoal.cluster.toml_file import read_cluster
from shoal.commands.bench_harness import measure_in_workers, say
from shoal.commands.launching import config_for, run_quietly, strategy_for
from shoal.errors import BadInput
from shoal.lab.lab import find_lab
from shoal.runtime.lab_files import LabFiles
from shoal.runtime.wording import counted

_FASTER = {"pulls_per_s": "speedup", "busiest_server_pulls_per_s": "busiest_server_speedup"}
_OTHERS = ("max_over_mean_cpu", "worker_cpu_ms", "server_cpu_ms", "busiest_link_bytes")


@dataclass(frozen=True)
class RowsBench:
    """What is pulled, how often, and how long workers use a row again."""

    rows: int
    dim: int
    batch: int
    pulls: int
    rounds: int
    warmup: int
    cache: int
    exponent: float
    share: float

    def check(self) -> None:
        if not 0 < self.share < 1:
            raise BadInput(
                f"--share is a share of all pulls, above 0 and below 1, not {self.share}"
            )
        if not 0 <= self.exponent <= 10:
            raise BadInput(f"--exponent is a number from 0 to 10, not {self.exponent}")


def measure(bench: RowsBench, workers: int, servers: int, on: str | None = None) -> dict[str, Any]:
    """`on`: the lab whose hosts workers and servers are spread over."""
    bench.check()
    rate = None if on is None else link_rate(on)
    processes = f"{counted(workers, 'worker')} and {counted(servers, 'server')}"
    say(f"measuring {processes} on {on or 'this host'}")
    strategy = strategy_for(f'ps(servers={servers}, mode="async")', workers)
    config = config_for(strategy, device="cpu")
    run = partial(run_quietly, on=on)
    measured = measure_in_workers("shoal.bench.rows", asdict(bench), workers, config, run)
    about = {"workers": workers, "servers": servers, "link_bytes_per_s": rate}
    return with_speedups({**about, **asdict(bench), **measured})


def link_rate(on: str) -> float:
    """Bytes a second of the payload that a link of this lab carries."""
    engine, _, name = on.partition("://")
    if engine != "lab":
        raise BadInput(f"--on takes lab or lab://NAME here, whose links have a rate; not {on!r}")
    lab = find_lab(name or None)
    if lab.design.hosts < 2:
        raise BadInput(f"lab {lab.design.name} has one host: without a link there is no rate")
    return read_cluster(LabFiles(lab.design.name).cluster).node_bytes_per_s


def with_speedups(document: dict[str, Any]) -> dict[str, Any]:
    """Beside the figures of each round: medians, and how they compare with asking owners."""
    owners = document["ways"]["owners"]
    for figures in document["ways"].values():
        for key, name in _FASTER.items():
            pairs = zip(figures[key], owners[key], strict=True)
            ratios = [mine / theirs for mine, theirs in pairs]
            figures[name] = statistics.median(ratios)
            figures[f"{name}_quartiles"] = _quartiles(ratios)
            figures[f"median_{key}"] = statistics.median(figures[key])
        for key in _OTHERS:
            figures[f"median_{key}"] = statistics.median(figures[key])
    if document["link_bytes_per_s"] is not None:
        _add_links(document)
    return document


def _quartiles(values: Sequence[float]) -> list[float]:
    low, _, high = statistics.quantiles(values, n=4)
    return [low, high]


def _add_links(document: dict[str, Any]) -> None:
    """How much of the busiest link each way uses, and what its bytes let expect."""
    of_owners = document["ways"]["owners"]["median_busiest_link_bytes"]
    for figures in document["ways"].values():
        num_bytes = figures["median_busiest_link_bytes"]
        figures["predicted_speedup"] = of_owners / num_bytes if num_bytes else 1.0
        bytes_per_s = num_bytes * figures["median_pulls_per_s"]
        figures["link_use"] = bytes_per_s / document["link_bytes_per_s"]
