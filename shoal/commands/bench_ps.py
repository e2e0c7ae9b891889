"""How `shoal bench ps` starts its workers and prints the results."""

from __future__ import annotations

import importlib.util
from typing import Any

from rich.table import Table

from shoal.cluster.units import parse_bytes
from shoal.commands.bench_harness import check_names, measure_in_workers, say, spread
from shoal.commands.launching import config_for, strategy_for
from shoal.commands.output import plain_table, wide_console

PEERS = ("ray", "rpc")


def measure(against: list[str], size: str, rows: int, rounds: int, workers: int) -> Any:
    against = [peer for peer in against if peer]
    check_names("--against", against, PEERS)
    if "ray" in against and importlib.util.find_spec("ray") is None:
        say("ray is not measured: it is not installed (pip install ray)")
        against.remove("ray")
    say(f"measuring {workers} workers and a server")
    options = {
        "bytes": parse_bytes(size),
        "rows": rows,
        "rounds": rounds,
        "against": ",".join(against),
    }
    config = config_for(strategy_for("ps", workers), device="cpu")
    return with_speeds(measure_in_workers("shoal.bench.ps", options, workers, config))


def with_speeds(document: dict[str, Any]) -> dict[str, Any]:
    """Beside each time of a sparse pull: the rows that a worker gets in a second."""
    for result in document["results"]:
        times = {way: t for way, t in result["sparse"].items() if way != "ratio"}
        result["rows_per_s"] = {
            way: document["rows"] / (timing["median_ms"] / 1e3) for way, timing in times.items()
        }
    return document


def print_table(document: dict[str, Any]) -> None:
    wide_console().print(table_of(document))
    print("peer / shoal above 1: Shoal is faster")


def table_of(document: dict[str, Any]) -> Table:
    title = f"{document['workers']} workers, one server: ms, medians (quartiles)"
    heads = ["peer", "operation", "shoal", "peer", "peer /\nshoal", "rows/s"]
    table = plain_table(title, heads, left=2)
    dense = f"push, pull {document['bytes'] / 1e6:.0f} MB"
    for result in document["results"]:
        peer = result["peer"] or ""
        rows = "\nagainst ".join(f"{speed:,.0f}" for speed in result["rows_per_s"].values())
        table.add_row(peer, dense, *_cells(result["dense"]), "")
        table.add_row(peer, f"pull {document['rows']:,} rows", *_cells(result["sparse"]), rows)
    return table


def _cells(timings: dict[str, Any]) -> list[str]:
    if "theirs" not in timings:
        return [spread(timings["shoal"], "_ms"), "", ""]
    ratio = spread(timings["ratio"], "")
    return [spread(timings["shoal"], "_ms"), spread(timings["theirs"], "_ms"), ratio]
