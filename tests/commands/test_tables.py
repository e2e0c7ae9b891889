"""Every table is readable on a terminal of 80 columns: no number is cut or broken."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from shoal.commands import bench, bench_collectives, bench_pipeline, bench_ps
from shoal.commands.compare import _table as compare_table
from shoal.commands.memory import COLUMNS, FURTHER
from shoal.commands.memory import _tables as memory_tables
from shoal.observe import time_shares
from shoal.observe.comparison import RunOutcome
from shoal.observe.trace import Span
from shoal.schedules.collectives.catalog import kinds
from tests.commands.terminal import shoal

WIDTH = 80


def lines_of(table: Table) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=WIDTH, highlight=False).print(table)
    lines = out.getvalue().splitlines()
    assert "…" not in out.getvalue()
    assert max(len(line.rstrip()) for line in lines) <= WIDTH
    return lines


def timing(value: float, unit: str) -> dict[str, float]:
    names = ("median", "low", "high")
    return {f"{name}{unit}": value + i for i, name in enumerate(names)}


def assert_on_one_line(lines: list[str], *cells: str) -> None:
    assert any(all(cell in line for cell in cells) for line in lines), (cells, lines)


def test_bench_collectives() -> None:
    us = {way: 123_456.7 + i for i, way in enumerate(bench_collectives.WAYS)}
    result = {"kind": "reduce_scatter", "ranks": 16, "bytes": 100_000_000, "median_us": us}
    times, ratios = (lines_of(table) for table in bench_collectives.tables([result]))
    assert_on_one_line(times, "reduce_scatter", "100 MB", *(f"{t:,.1f}" for t in us.values()))
    assert_on_one_line(ratios, "reduce_scatter", "1.00")
    assert len(ratios) == 4  # title, head of two lines, one row


def test_bench_step() -> None:
    result = {"workload": "mlp-small", "workers": 16, "parameters": 123_456_789, "peer": "x"}
    result |= {"shoal": timing(1234.567, "_ms"), "theirs": timing(2234.567, "_ms")}
    lines = lines_of(bench._table([{**result, "ratio": timing(1.234, "")}]))
    assert_on_one_line(lines, "mlp-small", "123,456,789", "1235", "2235")
    assert_on_one_line(lines, "(1236–1237)", "(2236–2237)")


def test_bench_ps() -> None:
    part = {"shoal": timing(123.4, "_ms"), "theirs": timing(223.4, "_ms"), "ratio": timing(1, "")}
    rows = {"shoal": 1_234_567.0, "theirs": 234_567.0}
    result = {"peer": "ray", "dense": part, "sparse": part, "rows_per_s": rows}
    document = {"workers": 2, "bytes": 100_000_000, "rows": 1000, "results": [result]}
    lines = lines_of(bench_ps.table_of(document))
    assert_on_one_line(lines, "ray", "push, pull 100 MB", "123.4", "223.4")
    assert_on_one_line(lines, "pull 1,000 rows", "1,234,567")


def test_bench_pipeline() -> None:
    step: dict[str, Any] = {"schedule": "1f1b", "ratio": timing(1.2, "")}
    step |= {"shoal": timing(1234.5, "_ms"), "theirs": timing(2234.5, "_ms")}
    idle = {"schedule": "interleaved", "simulated_idle": 0.123, "traced_idle": 0.145}
    times, shares = (lines_of(table) for table in bench_pipeline.tables([step], [idle]))
    assert_on_one_line(times, "1f1b", "1234", "2234", "1.2")
    assert_on_one_line(shares, "interleaved", "12.3%", "14.5%")


def test_compare() -> None:
    outcomes = [
        RunOutcome(
            'gossip(graph="ring", mode="async")',
            16,
            loss=12.3456,
            loss_gap=0.123,
            evaluated={"loss": 12.3456, "accuracy": 0.987},
            steps=10,
            steps_per_s=12_345.6,
            speed_up=12.34,
            bytes_sent=9_990_000,
            computing=0.5,
        )
    ]
    lines = lines_of(compare_table(outcomes, "digits on 16 workers"))
    assert_on_one_line(lines, "12.3456", "98.7%", "12,345.6", "12.34×", "999 KB", "50%")
    text = "".join(line.split(" ")[0] for line in lines[3:])
    assert text.startswith("gossip(graph=")


def test_memory_with_all_columns() -> None:
    row = {column: 123_456_789 for column in (*COLUMNS, *FURTHER)}
    document = {"estimated": [row] * 2, "measured": [row] * 2}
    words = {"params", "grads", "optimizer", "activations", "residuals", "gathered", "sum"}
    lines = [line for table in memory_tables(document, "gpt") for line in lines_of(table)]
    assert sum(line.count("123 MB") for line in lines) == 4 * len(row)
    assert_on_one_line(lines, "0 estimated", *["123 MB"] * 5, "1.23 GB")
    assert words <= set(" ".join(lines).split())


def test_where_the_time_went(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    spans = [Span("forward", 0, 50, "main", ""), Span("injected", 50, 10**12, "main", "")]
    time_shares.print_shares({100: spans})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert_on_one_line(lines, "100", "1000.00", "100.0%", "0.0%")


@pytest.mark.parametrize("kind", kinds())
def test_collectives(kind: str) -> None:
    answer = shoal("collectives", "--kind", kind, "--ranks", "64", "--bytes", "100GB")
    table = answer.stdout.split("\n\n")[0].splitlines()
    assert answer.exit_code == 0
    assert max(len(line.rstrip()) for line in table) <= WIDTH
