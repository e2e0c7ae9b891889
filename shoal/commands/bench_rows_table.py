"""The tables that `shoal bench rows` prints."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from shoal.cluster.units import show_rate
from shoal.commands.output import plain_table, wide_console
from shoal.runtime.wording import counted

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


def print_table(document: dict[str, Any]) -> None:
    wide_console().print(table_of(document))
    if document["link_bytes_per_s"] is None:
        print(_ON_ONE_HOST)
        return
    print(_ON_HOSTS)
    idle = [names_of(document)[way] for way in document["ways"] if not is_bound(document, way)]
    if idle:
        print(f"Not bound by a link, but by cores or by waiting: {'; '.join(idle)}.")


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
    table = plain_table(title, heads, left=1)
    for way, figures in document["ways"].items():
        first = (names_of(document)[way], f"{figures['copied_rows']:,}")
        load = f"{figures['max_over_mean_load']:.2f}"
        table.add_row(*first, load, *(_cells if rate is None else _cells_of_hosts)(figures))
    return table


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
