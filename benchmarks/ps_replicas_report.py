"""`python -m benchmarks ps --replicas 1,2,3`: what is compared, its table and picture."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness import check_names, measure_in_workers, say, spread
from shoal.cluster.units import parse_bytes, show_bytes
from shoal.commands.launching import check_folder, config_for, strategy_for
from shoal.commands.output import plain_table
from shoal.errors import BadInput

NOTE = """\
sent: of a push, to a server and along the chain, computed; a push: until it is
acknowledged, median (quartiles); slow copy: the same while the last copy is
stopped for 50 of each 60 ms; behind: pushes that a copy lacked and another had
shown. When the head is killed while all workers push: pushes that are
refused, acknowledged ones that are undone, and the time without service"""
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
        options = {"bytes": num_bytes, "rounds": self.rounds, "replicas": replicas}
        config = config_for(strategy_for(text, self.workers), device="cpu")
        found = measure_in_workers("benchmarks.ps_replicas", options, self.workers, config)
        return {"replicas": replicas, "consistency": consistency, **found}


def table_of(document: dict[str, Any]) -> Table:
    size = f"{document['bytes'] / 1e6:g} MB"
    title = f"{document['workers']} workers push {size}, one shard"
    heads = [
        "copies",
        "consis-\ntency",
        "sent",
        "ms a push",
        "to one\ncopy",
        "slow\ncopy",
        "behind",
    ]
    heads += ["re-\nfused", "undone", "without\nservice"]
    one = next((r["push"]["median_ms"] for r in document["results"] if r["replicas"] == 1), None)
    rows = [_row(result, one, document["bytes"]) for result in document["results"]]
    return plain_table(title, heads, rows, left=2)


def _row(result: dict[str, Any], one_ms: float | None, num_bytes: int) -> list[str]:
    ratio = "" if one_ms is None else f"{result['push']['median_ms'] / one_ms:.2f}×"
    sent = show_bytes(num_bytes * result["replicas"])
    row = [str(result["replicas"]), "", sent, spread(result["push"], "_ms"), ratio]
    if result["replicas"] == 1:
        return [*row, "", "", "all", "all", "to end"]
    row[1] = result["consistency"]
    row.append(f"{result['push_slow_copy']['median_ms']:.4g}")
    row += [str(result["largest_lag"]), str(result["refused"]), str(result["undone"])]
    return [*row, f"{result['without_service_s']:.2f} s"]


_STYLE = (
    "text{font-family:system-ui,'DejaVu Sans',sans-serif;font-size:14px;fill:#1d2733}"
    ".title{font-size:18px;font-weight:700}.note{font-size:12px;fill:#5a6675}"
)
_COLORS = {"strong": "#0072b2", "eventual": "#e69f00"}
_WIDTH = 900
_BAR = 26
_LEFT = 190
_LONGEST = 520


def draw(document: dict[str, Any]) -> str:
    """Two groups of bars: ms a push, and seconds without service at a kill."""
    results = document["results"]
    pushes = [(_name(r), r["push"]["median_ms"], r["consistency"], "ms") for r in results]
    kept = [r for r in results if r["without_service_s"] is not None]
    gaps = [(_name(r), r["without_service_s"], r["consistency"], "s") for r in kept]
    parts, bottom = _group("ms until a push is acknowledged", pushes, 60)
    more, bottom = _group("seconds without service when the head is killed", gaps, bottom + 20)
    notes = [
        f"{_name(r)}: copies up to {r['largest_lag']} pushes apart, {r['refused']} pushes refused, "
        f"{r['undone']} acknowledged pushes undone"
        for r in kept
    ]
    for note in notes:
        bottom += 20
        more.append(f'<text class="note" x="20" y="{bottom}">{escape(note)}</text>')
    size = f"{document['bytes'] / 1e6:g} MB"
    title = f"Replicated parameter server: {document['workers']} workers push {size}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 24}">'
        f"<style>{_STYLE}</style>"
        f'<rect width="{_WIDTH}" height="{bottom + 24}" fill="#fff"/>'
        f'<text class="title" x="20" y="32">{escape(title)}</text>'
    )
    return "\n".join([head, *parts, *more, "</svg>"]) + "\n"


def _name(result: dict[str, Any]) -> str:
    if result["replicas"] == 1:
        return "1 copy"
    return f"{result['replicas']} replicas, {result['consistency']}"


def _group(title: str, bars: list[tuple[str, float, str, str]], top: int) -> tuple[list[str], int]:
    parts = [f'<text x="20" y="{top + 16}" font-weight="700">{escape(title)}</text>']
    most = max((value for _, value, _, _ in bars), default=1.0) or 1.0
    y = top + 28
    for name, value, consistency, unit in bars:
        width = max(2.0, _LONGEST * value / most)
        middle = y + _BAR / 2 + 5
        parts.append(f'<text x="20" y="{middle}">{escape(name)}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 6}" '
            f'fill="{_COLORS[consistency]}"/>'
        )
        shown = f"{value:.3g} {unit}"
        parts.append(f'<text x="{_LEFT + width + 8:.1f}" y="{middle}">{shown}</text>')
        y += _BAR
    return parts, y
