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
        return with_ratios(json.loads(result.read_text()))


def with_ratios(found: dict[str, Any]) -> dict[str, Any]:
    """Each peer's time over ours, and the rows a worker pulls in a second."""
    for what in ("dense", "sparse"):
        times = found[f"{what}_ms"]
        ours = times["shoal"]["median_ms"]
        found[f"{what}_ratio"] = {
            peer: times[peer]["median_ms"] / ours for peer in times if peer != "shoal"
        }
    found["rows_per_s"] = {
        way: found["rows"] / (timing["median_ms"] / 1e3)
        for way, timing in found["sparse_ms"].items()
    }
    return found


def print_table(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{found['workers']} workers, one server; medians (quartiles)")
    dense_title = f"push and pull of {found['bytes'] / 1e6:.0f} MB"
    sparse_title = f"pull of {found['rows']:,} rows"
    for column in ("", dense_title, "theirs / ours", sparse_title, "rows/s", "theirs / ours"):
        table.add_column(column, justify="right")
    for way, dense in found["dense_ms"].items():
        sparse = found["sparse_ms"][way]
        table.add_row(
            way, _ms(dense), _ratio(found["dense_ratio"], way), _ms(sparse),
            f"{found['rows_per_s'][way]:,.0f}", _ratio(found["sparse_ratio"], way),
        )  # fmt: skip
    Console().print(table)


def _ms(timing: dict[str, float]) -> str:
    return f"{timing['median_ms']:.2f} ms ({timing['low_ms']:.2f} to {timing['high_ms']:.2f})"


def _ratio(ratios: dict[str, float], way: str) -> str:
    return f"{ratios[way]:.2f}" if way in ratios else ""
