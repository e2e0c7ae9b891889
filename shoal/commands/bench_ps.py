"""How `shoal bench ps` starts its workers and shows what they found."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from shoal.commands.target import environment, run_quietly, strategy_for
from shoal.commands.units import parse_bytes
from shoal.errors import BadInput

PEERS = ("ray", "rpc")


def measure(against: list[str], size: str, rows: int, rounds: int, workers: int) -> Any:
    unknown = set(against) - {*PEERS, ""}
    if unknown:
        raise BadInput(f"{', '.join(sorted(unknown))}: take {', '.join(PEERS)}")
    if "ray" in against and importlib.util.find_spec("ray") is None:
        print("ray is not measured: it is not installed (pip install ray)", file=sys.stderr)
        against = [peer for peer in against if peer != "ray"]
    print(f"measuring {workers} workers and a server", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        result = Path(folder) / "result.json"
        command = [
            sys.executable, "-m", "shoal.bench.ps", "--bytes", str(parse_bytes(size)), "--rows",
            str(rows), "--rounds", str(rounds), "--against", ",".join(against), "--result",
            str(result),
        ]  # fmt: skip
        strategy = strategy_for("ps", workers)
        run_quietly(command, workers, environment(strategy, device="cpu"))
        return with_speeds(json.loads(result.read_text()))


def with_speeds(found: dict[str, Any]) -> dict[str, Any]:
    """Beside each time of a sparse pull: the rows that a worker gets in a second."""
    for result in found["results"]:
        times = {way: t for way, t in result["sparse"].items() if way != "ratio"}
        result["rows_per_s"] = {
            way: found["rows"] / (timing["median_ms"] / 1e3) for way, timing in times.items()
        }
    return found


def print_table(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{found['workers']} workers, one server: ms, medians (quartiles)")
    for column in ("", "", "shoal", "peer", "peer / shoal", "rows/s"):
        table.add_column(column, justify="left" if not column else "right")
    dense = f"push and pull of {found['bytes'] / 1e6:.0f} MB"
    for result in found["results"]:
        peer = result["peer"] or ""
        rows = " against ".join(f"{speed:,.0f}" for speed in result["rows_per_s"].values())
        table.add_row(peer, dense, *_cells(result["dense"]), "")
        table.add_row(peer, f"pull of {found['rows']:,} rows", *_cells(result["sparse"]), rows)
    Console().print(table)
    print("peer / shoal above 1: Shoal is faster")


def _cells(found: dict[str, Any]) -> list[str]:
    if "theirs" not in found:
        return [_spread(found["shoal"], "_ms"), "", ""]
    ratio = _spread(found["ratio"], "")
    return [_spread(found["shoal"], "_ms"), _spread(found["theirs"], "_ms"), ratio]


def _spread(found: dict[str, float], unit: str) -> str:
    median, low, high = (found[key + unit] for key in ("median", "low", "high"))
    return f"{median:.2f} ({low:.2f} to {high:.2f})"
