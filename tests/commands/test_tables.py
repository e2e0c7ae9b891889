"""Every table is readable on a terminal of 80 columns: no number is cut or broken."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks import collectives as bench
from shoal.commands import output
from shoal.commands.compared import WAYS_TO_WAIT, result_table, speed_table
from shoal.commands.memory import COLUMNS, FURTHER
from shoal.commands.memory import _tables as memory_tables
from shoal.observe.comparison import RunOutcome
from shoal.observe.time_shares import all_shares
from shoal.runtime.trace import Span
from shoal.schedules.collectives.catalog import kinds
from shoal.strategy.strategy import as_strategy
from tests.commands.terminal import shoal

WIDTH = 80


def lines_of(table: Table) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=WIDTH, highlight=False).print(table)
    lines = out.getvalue().splitlines()
    assert "…" not in out.getvalue()
    assert max(len(line.rstrip()) for line in lines) <= WIDTH
    return lines


def assert_on_one_line(lines: list[str], *cells: str) -> None:
    assert any(all(cell in line for cell in cells) for line in lines), (cells, lines)


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
            cpu_s_per_step=0.123,
            bytes_sent=9_990_000,
            computing=0.5,
            speed_ups=(11.11, 12.34),
            slowed=3.99,
            dropped=1_234,
            staleness=12.34,
            until_s=1234.56,
            until_steps=12_345,
        )
    ]
    lines = lines_of(speed_table(outcomes, "digits on 16 workers"))
    speeds = ("12,345.6", "12.34×", "11.11–12.34", "3.99×", "999 KB", "50%")
    assert_on_one_line(lines, *speeds)
    results = lines_of(result_table(outcomes, "loss=0.2"))
    assert_on_one_line(results, "12.3456", "98.7%", "1234.56", "12,345", "1,234", "12.3")
    text = "".join(line.split(" ")[0] for line in lines[3:])
    assert text.startswith("gossip(graph=")


def test_a_speed_of_unlike_workers_has_the_slowest_and_the_fastest() -> None:
    for between, shown in (((4.0, 16.1), True), ((9.5, 10.5), False), (None, False)):
        one = RunOutcome("ps", 4, steps=10, steps_per_s=10.0, steps_per_s_between=between)
        lines = lines_of(speed_table([one], "gpt"))
        assert ("4.0–16.1" in "\n".join(lines)) is shown
        assert_on_one_line(lines, "ps", "10.0")


def test_the_straggler_table_breaks_no_default_strategy() -> None:
    names = [str(as_strategy(text)) for text in WAYS_TO_WAIT]
    outcomes = [
        RunOutcome(
            strategy, 4, loss=3.1108, loss_gap=0.4, steps=40, steps_per_s=1_012.5,
            speed_up=0.92, speed_ups=(0.88, 1.03), cpu_s_per_step=0.0424, bytes_sent=26_040_000,
            computing=0.41, slowed=13.35, dropped=39, staleness=12.3,
        )
        for strategy in names
    ]  # fmt: skip
    for table in (speed_table(outcomes, "gpt"), result_table(outcomes, None)):
        lines = lines_of(table)
        assert [line for line in lines if line.split(" ")[0] in names] == lines[-len(names) :]


def test_memory_with_all_columns() -> None:
    row = {column: 123_456_789 for column in (*COLUMNS, *FURTHER, "host")}
    document = {"estimated": [row] * 2, "measured": [row] * 2}
    words = {"params", "grads", "optimizer", "activations", "residuals", "gathered", "sum"}
    lines = [line for table in memory_tables(document, "gpt") for line in lines_of(table)]
    assert sum(line.count("123 MB") for line in lines) == 4 * len(row)
    assert_on_one_line(lines, "0 estimated", *["123 MB"] * 5, "1.23 GB", "123 MB")
    assert words <= set(" ".join(lines).split())


def test_where_the_time_went() -> None:
    spans = [Span("forward", 0, 10**12, "main"), Span("wait", 10**12, 2 * 10**12, "main")]
    table, *_ = output.shares_of_time(all_shares({100: spans}))
    assert isinstance(table, Table)
    assert_on_one_line(lines_of(table), "100", "2000.00", "50.0%", "50.0%")


HEADS = ["strategy", "test\nloss", "speed-\nup", "CPU a\nstep", "sent to\nothers", "bound by"]
ROWS = [
    ["ddp", "12.3456", "12.34×", "123 ms", "1.23 GB", "compute"],
    [
        'gossip(graph="ring", mode="async")',
        "0.0001",
        "1.00×",
        "9 µs",
        "",
        "the network, of 9 links",
    ],
]


@pytest.mark.parametrize("width", range(30, 130))
def test_a_table_of_any_width_has_all_headings_and_numbers(width: int) -> None:
    table = output.plain_table("a title", HEADS, ROWS, left=1)
    table.columns[-1].justify = "left"
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines[0] == "a title"
    assert max(map(len, lines)) <= width
    for cell in (cell for row in ROWS for cell in row[1:5]):
        assert_on_one_line(lines, cell)
    words = " ".join(lines).replace("speed-", "speed")
    names = ("strategy", "test", "loss", "speed", "CPU a", "sent to", "others", "bound by")
    assert all(name in words for name in (*names, "network,", 'gossip(graph="ring",')), words


def test_a_table_that_is_too_wide_is_stacked() -> None:
    out = io.StringIO()
    Console(file=out, width=40, highlight=False).print(output.plain_table("", HEADS, ROWS, left=1))
    assert out.getvalue().splitlines()[:6] == [
        "strategy ddp",
        "  test loss       12.3456",
        "  speedup         12.34×",
        "  CPU a step      123 ms",
        "  sent to others  1.23 GB",
        "  bound by        compute",
    ]


COMMANDS = [
    "cluster show dgx-h100",
    "cluster show seeds-rack",
    "collectives",
    "collectives --cluster dgx-h100",
    "collectives --ranks 2,4,8,16,32,64,128",
    "collectives show all_reduce ring --ranks 4",
    "graphs -n 16",
    "pipeline list",
    "pipeline show 1f1b",
    "plan gpt-2 --cluster dgx-h100",
    "plan gpt-2 --cluster dgx-h100 -n 16 --mtbf 8h --spare 2 --top 3",
    "predict gpt-2 --cluster dgx-h100 -n 1,2,4,8",
    "predict gpt-2 --cluster dgx-h100 -n 8",
    "predict gpt-2 --cluster dgx-h100 -n 64 -s zero(3) --node-mtbf 5000h",
]


STARTING_WORKERS = [
    "collectives run reduce tree --data 1,2,3,4",
    "compare -n 2 -s ddp --steps 4 digits",
    "explain -n 4 ddp+pp(2)",
    "memory -n 2 gpt",
]


@pytest.mark.parametrize(
    "command", [*COMMANDS, *(pytest.param(c, marks=pytest.mark.whole) for c in STARTING_WORKERS)]
)
def test_a_terminal_of_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    answer = shoal(*command.split())
    assert answer.exit_code == 0, answer.stderr
    assert re.search(r"\S…|…\S", answer.stdout) is None


@pytest.mark.parametrize("words", ["", "cluster", "lab"])
def test_help_tells_in_whole_sentences_what_commands_do(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    answer = shoal(*words.split(), "--help")
    _, commands = answer.stdout.split("Commands:")
    assert commands.count(".\n") >= 3 and "..." not in commands


@pytest.mark.parametrize("kind", kinds())
def test_collectives(kind: str) -> None:
    answer = shoal("collectives", "--kind", kind, "--ranks", "64", "--bytes", "100GB")
    table = answer.stdout.split("\n\n")[0].splitlines()
    assert answer.exit_code == 0
    assert max(len(line.rstrip()) for line in table) <= WIDTH


def test_the_benchmark_of_collectives() -> None:
    us = dict.fromkeys(bench.WAYS, 123_456.7)
    results = [{"kind": "reduce_scatter", "ranks": 16, "bytes": 1 << 20, "median_us": us}]
    times, ratios = map(lines_of, bench.tables(results))
    assert_on_one_line(times, "reduce_scatter", "16", "1.05 MB", *["123,456.7"] * len(us))
    assert_on_one_line(ratios, "reduce_scatter", "1.00", "1.00")
