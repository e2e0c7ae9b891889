"""How `shoal bench rows` starts its workers and prints the results."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from shoal.commands.bench_harness import measure_in_workers, say
from shoal.commands.launching import config_for, strategy_for
from shoal.commands.output import plain_table, wide_console
from shoal.errors import BadInput

_FASTER = {"pulls_per_s": "speedup", "busiest_server_pulls_per_s": "busiest_server_speedup"}


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


def measure(bench: RowsBench, workers: int, servers: int) -> dict[str, Any]:
    bench.check()
    say(f"measuring {workers} workers and {servers} servers")
    strategy = strategy_for(f'ps(servers={servers}, mode="async")', workers)
    config = config_for(strategy, device="cpu")
    measured = measure_in_workers("shoal.bench.rows", asdict(bench), workers, config)
    document = {"workers": workers, "servers": servers, **asdict(bench), **measured}
    return with_speedups(document)


def with_speedups(document: dict[str, Any]) -> dict[str, Any]:
    """Beside the figures of each round: medians, and how they compare with asking owners."""
    owners = document["ways"]["owners"]
    for figures in document["ways"].values():
        for key, name in _FASTER.items():
            pairs = zip(figures[key], owners[key], strict=True)
            figures[name] = statistics.median(mine / theirs for mine, theirs in pairs)
            figures[f"median_{key}"] = statistics.median(figures[key])
        figures["median_max_over_mean_cpu"] = statistics.median(figures["max_over_mean_cpu"])
    return document


def print_table(document: dict[str, Any]) -> None:
    wide_console().print(table_of(document))
    print(
        "largest/mean: of rows served by a server, and of CPU time of a server. Busiest server: "
        "the pulls for which its CPU time\nis one second; it bounds the speed where servers do "
        "not share cores."
    )


def table_of(document: dict[str, Any]) -> Table:
    title = (
        f"{document['rows']:,} rows by range on {document['servers']} servers, "
        f"Zipf({document['exponent']:g}), {document['workers']} workers, "
        f"{document['rows_per_pull']:.0f} rows a pull"
    )
    heads = [
        *("rows are asked of", "copied\nrows", "largest/mean\nrows", "largest/mean\nCPU"),
        *("pulls/s", "times\nowners", "busiest\nserver", "times\nowners"),
    ]
    table = plain_table(title, heads, left=1)
    names = {
        "owners": "owners",
        "copies": "all servers, if hot",
        "cache": f"the same, kept {document['cache']} steps ({document['hit_rate']:.0%} hits)",
    }
    for way, figures in document["ways"].items():
        table.add_row(
            names[way],
            f"{figures['copied_rows']:,}",
            f"{figures['max_over_mean_load']:.2f}",
            f"{figures['median_max_over_mean_cpu']:.2f}",
            f"{figures['median_pulls_per_s']:,.0f}",
            f"{figures['speedup']:.2f}",
            f"{figures['median_busiest_server_pulls_per_s']:,.0f}",
            f"{figures['busiest_server_speedup']:.2f}",
        )
    return table
