"""How `python -m benchmarks rows` starts workers and servers, and compares what they measure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.table import Table

from benchmarks.harness import measure_in_workers, say
from shoal.cluster.toml_file import read_cluster
from shoal.cluster.units import show_rate
from shoal.commands.launching import config_for, run_quietly, strategy_for
from shoal.commands.output import plain_table
from shoal.errors import BadInput
from shoal.launch.lab.lab import find_lab
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


def run(bench: RowsBench, workers: int, servers: int, on: str | None = None) -> dict[str, Any]:
    """`on`: the lab whose hosts workers and servers are spread over."""
    bench.check()
    rate = None if on is None else link_rate(on)
    processes = f"{counted(workers, 'worker')} and {counted(servers, 'server')}"
    say(f"measuring {processes} on {on or 'this host'}")
    strategy = strategy_for(f'ps(servers={servers}, mode="async")', workers)
    config = config_for(strategy, device="cpu")
    run = partial(run_quietly, on=on)
    measured = measure_in_workers("benchmarks.rows", asdict(bench), workers, config, run)
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


_FULL = 0.8  # of a link: it is what bounds the speed
_ON_ONE_HOST = (
    "largest/mean: of rows served by a server, and of CPU time of a server. Busiest server: "
    "the pulls for which its CPU time\nis one second; it bounds the speed where servers do "
    "not share cores."
)
_ON_HOSTS = (
    "Workers and servers are spread over the hosts. largest/mean: of rows served by a server. "
    "Busiest link: what that of\none host carries in one direction for a pull, and how much of "
    "its rate that takes. Predicted: by these bytes alone."
)


def report(document: dict[str, Any]) -> list[Table | str]:
    if document["link_bytes_per_s"] is None:
        return [table_of(document), _ON_ONE_HOST]
    idle = [names_of(document)[way] for way in document["ways"] if not is_bound(document, way)]
    bound = f"Not bound by a link, but by cores or by waiting: {'; '.join(idle)}."
    return [table_of(document), _ON_HOSTS, *([bound] if idle else [])]


def is_bound(document: dict[str, Any], way: str) -> bool:
    """Whether the busiest link bounds this way."""
    return bool(document["ways"][way]["link_use"] >= _FULL)


def names_of(document: dict[str, Any]) -> dict[str, str]:
    kept = counted(document["cache"], "step")
    return {
        "owners": "owners",
        "copies": "all servers, if hot",
        "cache": f"the same, kept {kept} ({document['hit_rate']:.0%} hits)",
    }


def table_of(document: dict[str, Any]) -> Table:
    rate = document["link_bytes_per_s"]
    over = "" if rate is None else f", links of {show_rate(rate)}"
    title = (
        f"{document['rows']:,} rows by range on {counted(document['servers'], 'server')}, "
        f"Zipf({document['exponent']:g}), {counted(document['workers'], 'worker')}, "
        f"{document['rows_per_pull']:.0f} rows a pull{over}"
    )
    heads = ["rows are asked of", "copied\nrows", "largest/mean\nrows"]
    heads += _HEADS if rate is None else _HEADS_OF_HOSTS
    rows = []
    for way, figures in document["ways"].items():
        first = (names_of(document)[way], f"{figures['copied_rows']:,}")
        load = f"{figures['max_over_mean_load']:.2f}"
        rows.append([*first, load, *(_cells if rate is None else _cells_of_hosts)(figures)])
    return plain_table(title, heads, rows, left=1)


_HEADS = [
    *("largest/mean\nCPU", "pulls/s", "times\nowners", "busiest\nserver", "times\nowners"),
    *("CPU ms:\nservers", "\nworkers"),
]
_HEADS_OF_HOSTS = [
    *("busiest\nlink", "of its\nrate", "pulls/s", "times owners\n(quartiles)", "predicted"),
    *("CPU ms:\nservers", "\nworkers"),
]


def _cells(figures: dict[str, Any]) -> list[str]:
    return [
        f"{figures['median_max_over_mean_cpu']:.2f}",
        f"{figures['median_pulls_per_s']:,.0f}",
        f"{figures['speedup']:.2f}",
        f"{figures['median_busiest_server_pulls_per_s']:,.0f}",
        f"{figures['busiest_server_speedup']:.2f}",
        *_cpu(figures),
    ]


def _cells_of_hosts(figures: dict[str, Any]) -> list[str]:
    low, high = figures["speedup_quartiles"]
    return [
        f"{figures['median_busiest_link_bytes'] / 1e6:.2f} MB",
        f"{figures['link_use']:.0%}",
        f"{figures['median_pulls_per_s']:,.1f}",
        f"{figures['speedup']:.2f} ({low:.2f}–{high:.2f})",
        f"{figures['predicted_speedup']:.2f}",
        *_cpu(figures),
    ]


def _cpu(figures: dict[str, Any]) -> list[str]:
    """Of a pull, in milliseconds."""
    return [f"{figures[f'median_{who}_cpu_ms']:.2f}" for who in ("server", "worker")]
