"""`shoal bench ps --replicas 1,2,3 --consistency strong,eventual`: table, JSON and picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from shoal.cluster.units import parse_bytes
from shoal.commands.bench_harness import check_names, measure_in_workers, say, spread
from shoal.commands.bench_ps_svg import draw
from shoal.commands.launching import check_folder, config_for, strategy_for
from shoal.commands.output import plain_table, wide_console
from shoal.errors import BadInput

_WORDS = ("strong", "eventual")
_MOST_REPLICAS = 16


@dataclass(frozen=True)
class ReplicaBench:
    """What is compared; texts as the options take them."""

    replicas: str
    consistency: str
    size: str
    rounds: int
    workers: int
    svg: Path | None = None

    def run(self) -> dict[str, Any]:
        cases = self.cases()
        check_folder(self.svg, "a picture")
        num_bytes = parse_bytes(self.size)
        results = []
        for replicas, consistency in cases:
            results.append(self._measure(replicas, consistency, num_bytes))
        document = {
            "workers": self.workers,
            "bytes": num_bytes,
            "pushes": self.rounds,
            "results": results,
        }
        if self.svg is not None:
            self.svg.write_text(draw(document), encoding="utf-8")
        return document

    def cases(self) -> list[tuple[int, str]]:
        """A single copy has one consistency."""
        words = [word for word in self.consistency.split(",") if word]
        check_names("--consistency", words, _WORDS)
        numbers = [word.strip() for word in self.replicas.split(",")]
        for word in numbers:
            if not word.isdigit() or not 1 <= int(word) <= _MOST_REPLICAS:
                raise BadInput(
                    f"--replicas takes numbers from 1 to {_MOST_REPLICAS} such as 1,2,3, "
                    f"not {self.replicas[:40]!r}"
                )
        found = [(int(n), word) for n in numbers for word in (words if int(n) > 1 else ["strong"])]
        return list(dict.fromkeys(found))

    def _measure(self, replicas: int, consistency: str, num_bytes: int) -> dict[str, Any]:
        text = f'ps(mode="async", replicas={replicas}'
        text += f', consistency="{consistency}")' if replicas > 1 else ")"
        say(f"measuring {text} with {self.workers} workers")
        options = {"bytes": num_bytes, "rounds": self.rounds, "kill": int(replicas > 1)}
        config = config_for(strategy_for(text, self.workers), device="cpu")
        found = measure_in_workers("shoal.bench.ps_replicas", options, self.workers, config)
        return {"replicas": replicas, "consistency": consistency, **found}

    def print(self, document: dict[str, Any]) -> None:
        wide_console().print(table_of(document))
        print("a push: until it is acknowledged, median (quartiles); behind: pushes that a copy")
        print("lacked and another had shown; a kill: of the head, while all workers push")


def table_of(document: dict[str, Any]) -> Table:
    size = f"{document['bytes'] / 1e6:g} MB"
    title = f"{document['workers']} workers push {size}, one shard"
    heads = ["replicas", "consistency", "ms a push", "to one\ncopy", "behind"]
    heads += ["refused\nat a kill", "undone", "without\nservice"]
    table = plain_table(title, heads, left=2)
    one = next((r["push"]["median_ms"] for r in document["results"] if r["replicas"] == 1), None)
    for result in document["results"]:
        table.add_row(*_row(result, one))
    return table


def _row(result: dict[str, Any], one_ms: float | None) -> list[str]:
    ratio = "" if one_ms is None else f"{result['push']['median_ms'] / one_ms:.2f}×"
    row = [str(result["replicas"]), "", spread(result["push"], "_ms"), ratio]
    if result["replicas"] == 1:
        return [*row, "", "all: it ends\nthe run", "all", "to the end"]
    row[1] = result["consistency"]
    row += [str(result["largest_lag"]), str(result["refused"]), str(result["undone"])]
    return [*row, f"{result['without_service_s']:.2f} s"]
