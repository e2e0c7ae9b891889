"""`shoal collectives run`: on real processes; and what collectives cost on 2, 4, 8, … ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.cluster.units import parse_bytes, show_bytes, show_seconds
from shoal.commands import options
from shoal.commands.options import argument, option
from shoal.commands.output import Part, plain_table, write_text
from shoal.commands.output import show as show_parts
from shoal.errors import BadInput
from shoal.runtime.chart import Axis, bars, line_chart
from shoal.runtime.files import scratch_folder
from shoal.runtime.memory_limit import cores
from shoal.runtime.wording import counted, nearest
from shoal.schedules.collectives.catalog import algorithms, build, proven_collective
from shoal.schedules.collectives.cost import Link, Price, price, price_all
from shoal.schedules.collectives.kinds import kind_named
from shoal.schedules.user import is_user_function

MOST_PROCESSES = 64
_MESSAGES = ("push", "pull")  # between two ranks
_TAKE_PIECES = ("scatter", "reduce_scatter", "all_to_all")  # a rank begins with one for each
_OPS = ("sum", "mean", "max", "min", "prod")
_COLUMNS = 6  # numbers of ranks side by side, at 80 columns
Numbers = list[int] | list[float]


def run(
    kind: str = argument("reduce, all_gather, scan, …; push or pull.", ...),
    name: str | None = argument(
        "ring, tree, …; or FILE.py:FUNCTION of your own.", show_default="the first"
    ),
    data: str | None = option(
        "A number for each rank: 1,2,3,4; or several: 1,2/3,4 for two ranks."
    ),
    root: int = option("The rank that sends to all or gets all.", 0),
    op: str = option(f"How numbers are combined: {', '.join(_OPS)}.", "sum"),
    ranks: str | None = option("Instead of --data: what it costs on 2,4,8,…,1024 ranks."),
    size: str = option("Of the vector, with --ranks.", "1MB", "--bytes"),
    processes: int | None = option(
        "Measure up to so many ranks.", min=0, show_default="one for each core"
    ),
    svg: Path | None = option("Draw times over ranks here."),
    as_json: options.Json = False,
) -> None:
    """Run one algorithm on real processes, on your own numbers.

    Each rank's numbers before and after, and the bytes that it sent. With --ranks: how time,
    traffic, redundant memory and idle links grow with the ranks, measured where there are cores.
    """
    if (data is None) == (ranks is None):
        raise BadInput("give the numbers of each rank with --data 1,2,3,4, or --ranks 2,4,8")
    if ranks is not None:
        most = cores() if processes is None else processes
        _sweep_one(kind, name, ranks, size, most, svg, as_json)
        return
    if svg is not None:
        raise BadInput("--svg draws times over --ranks; `shoal collectives show` draws rounds")
    plan = own_numbers(kind, name, str(data), root, op)
    found = _in_processes(plan, len(plan["rows"]))
    ranked = [
        {"rank": rank, "has": row, "result": one["found"], "sent_bytes": one["sent"]}
        for rank, (row, one) in enumerate(zip(plan["rows"], found, strict=True))
    ]
    show_parts({**plan, "ranks": ranked}, _shown_ranks(plan, ranked), as_json)


def own_numbers(kind: str, name: str | None, data: str, root: int, op: str) -> dict[str, Any]:
    """The call that processes make; BadInput where the numbers do not suit the collective."""
    if op not in _OPS:
        raise BadInput(f"there is no operator {op!r}; {nearest(op, _OPS)}")
    rows = _rows(data, is_one=kind == "scatter")
    size = len(rows)
    is_whole = all(isinstance(n, int) for row in rows for n in row)
    if size > MOST_PROCESSES:
        raise BadInput(f"--data has {size} ranks: a process each, {MOST_PROCESSES} at most")
    algorithm = None if kind in _MESSAGES else name or algorithms(kind)[0]
    if algorithm is not None:
        _built(kind, algorithm, size, root)
    elif name is not None or size < 2:
        raise BadInput(f"{kind} is a message between two ranks: {kind} --data 1,2")
    if not 0 <= root < size:
        raise BadInput(f"the root must be one of the ranks 0 to {size - 1}, not {root}")
    piece = len(rows[root])
    if kind in _TAKE_PIECES:
        if piece % size:
            example = "/".join([",".join("1" * size)] * size)
            raise BadInput(f"{kind} needs a number for each rank on every rank: --data {example}")
        piece //= size
    if kind == "scatter":
        rows = [rows[0] if rank == root else [] for rank in range(size)]
    dtype = "int64" if is_whole and op != "mean" else "float64"
    given = {"kind": kind, "algorithm": algorithm, "root": root, "op": op}
    return {**given, "dtype": dtype, "piece": piece, "rows": rows}


def _shown_ranks(plan: Mapping[str, Any], ranked: Sequence[Mapping[str, Any]]) -> list[Part]:
    """A table, and a line such as `[1] [2] [3] [4] → reduce → [10]`."""
    how = f" by {plan['algorithm']}" if plan["algorithm"] else ""
    how += f", {plan['op']}" if plan["op"] != "sum" else ""
    title = f"{plan['kind']}{how} on {counted(len(ranked), 'process', 'processes')}"
    rows = [
        [str(one["rank"]), *map(_shown, (one["has"], one["result"])), _sent(one["sent_bytes"])]
        for one in ranked
    ]
    table = plain_table(title, ["rank", "has", "has then", "sent (counted there)"], rows, left=4)
    before, after = (
        " ".join(_shown(one[key]) for one in ranked if one[key]) for key in ("has", "result")
    )
    return [table, "", f"{before} → {plan['kind']} → {after or 'all have come'}"]


def _rows(data: str, is_one: bool) -> list[Numbers]:
    """A row for each rank; the pieces of `is_one` row are as many as its numbers."""
    try:
        numbers = [[float(word) for word in row.split(",")] for row in data.split("/")]
    except ValueError:
        example = "1,2,3,4, or 1,2/3,4 for two ranks with two numbers each"
        raise BadInput(f"--data takes numbers such as {example}, not {data[:40]!r}") from None
    if len(numbers) == 1:
        numbers = numbers * len(numbers[0]) if is_one else [[number] for number in numbers[0]]
    if len({len(row) for row in numbers}) > 1:
        raise BadInput(f"--data {data[:40]}: every rank needs as many numbers as the others")
    if all(n.is_integer() and abs(n) < 2**53 for row in numbers for n in row):
        return [[int(n) for n in row] for row in numbers]
    return [list(row) for row in numbers]


def _shown(numbers: Sequence[float] | None) -> str:
    if not numbers:
        return "-"
    words = [str(n) if isinstance(n, int) else f"{n:.6g}" for n in numbers]
    return f"[{', '.join(words)}]"


def _sent(sent: Mapping[str, int]) -> str:
    peers = [f"{size} B to {peer}" for peer, size in sent.items()]
    return ", ".join(peers[:4]) + (f" and {len(peers) - 4} more" * (len(peers) > 4)) or "nothing"


def _built(kind: str, name: str, ranks: int, root: int = 0) -> Any:
    if is_user_function(name):
        return proven_collective(name, kind_named(kind).name, ranks)
    return build(kind, name, ranks, root if kind_named(kind).rooted else 0)


def _in_processes(plan: Mapping[str, Any], processes: int) -> list[Any]:
    """What each of so many processes has found, started as training starts workers."""
    from shoal.commands.launching import config_for, run_quietly, strategy_for

    with scratch_folder("collective") as folder:
        (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        command = [sys.executable, "-m", "shoal.commands.collective_worker", str(folder)]
        config = config_for(strategy_for(None, processes), device="cpu")
        run_quietly(command, processes, config)
        files = [folder / f"{rank}.json" for rank in range(processes)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


# ------------------------------------------------------------------------ over numbers of ranks


def _sweep_one(
    kind: str, name: str | None, ranks: str, size: str, most: int, svg: Path | None, as_json: bool
) -> None:
    """One algorithm: a row for each number of ranks."""
    counts = sorted(options.parse_counts("--ranks", ranks))
    num_bytes = parse_bytes(size)
    name = name or algorithms(kind)[0]
    prices = [price(_built(kind, name, count), num_bytes, Link()) for count in counts]
    measured = _measured(kind, name, num_bytes, [n for n in counts if 1 < n <= most])
    heads = ["ranks", "rounds", "sent/\nrank", "sent\ntotal", "redundant\nmemory", "idle\nlinks"]
    rows = []
    for one in prices:
        sizes = (one.sent_largest_bytes, one.sent_total_bytes, one.redundant_bytes)
        took = show_seconds(measured[one.ranks]) if one.ranks in measured else "-"
        row = [
            f"{one.ranks:,}",
            f"{one.rounds:,}",
            *map(show_bytes, sizes),
            f"{one.idle_share:.0%}",
        ]
        rows.append([*row, f"{one.idle_share:.0%}", show_seconds(one.time_s), took])
    title = f"{kind} {name} of {show_bytes(num_bytes)}"
    table = plain_table(title, [*heads, "time", "measured"], rows)
    times = {f"{one.ranks:,}": one.time_s for one in prices}
    parts: list[Part] = [table, "", *bars(times, show_seconds), "", _SAYS_COMPUTED]
    if measured:
        parts.append(f"measured: the median in processes of this host, which has {cores()} cores.")
    if svg is not None:
        lines = {"computed": [(one.ranks, one.time_s) for one in prices]}
        write_chart(svg, title, lines | ({"~measured": list(measured.items())} if measured else {}))
    document = {"kind": kind, "algorithm": name, "bytes": num_bytes, "measured_s": measured}
    show_parts({**document, "computed": list(map(asdict, prices))}, parts, as_json, wraps=True)


_SAYS_COMPUTED = (
    "computed from the schedule: all but the column measured; time at 10 µs a message and "
    "10 GB/s. Redundant: what all ranks hold beyond one copy of the result. Idle links: how much "
    "of the time of all ports, out and in, nothing goes through them."
)


def _measured(kind: str, name: str, num_bytes: int, counts: Sequence[int]) -> dict[int, float]:
    if not counts or num_bytes == 0 or kind == "barrier":
        return {}
    if max(counts) > MOST_PROCESSES:
        raise BadInput(f"--processes: {MOST_PROCESSES} at most, not {max(counts)}")
    plan = {"kind": kind, "algorithm": name, "root": 0, "op": "sum", "bytes": num_bytes}
    plan |= {"measured": list(counts), "takes_pieces": kind in _TAKE_PIECES}
    plan["divided"] = kind_named(kind).units(2) > 1
    found = _in_processes(plan, max(counts))
    return dict(zip(counts, found[0]["found"], strict=True))


def sweep(
    kinds: Iterable[str], counts: Sequence[int], num_bytes: int, cost: Link
) -> tuple[list[dict[str, object]], list[Part], dict[str, list[tuple[int, float]]]]:
    """All algorithms over numbers of ranks: for JSON, as tables, and as lines of a chart."""
    parts: list[Part] = []
    documents = []
    lines = {}
    for kind in kinds:
        found = {n: {p.algorithm: p for p in price_all(kind, n, num_bytes, cost)} for n in counts}
        parts += _kind_tables(f"{kind} of {show_bytes(num_bytes)}", found)
        for name in found[counts[-1]]:
            lines[name] = [(n, found[n][name].time_s) for n in counts]
        documents += [
            {"kind": kind, "ranks": n, "algorithms": list(map(asdict, prices.values()))}
            for n, prices in found.items()
        ]
    said = "All of it is computed from the schedules; `shoal collectives run` measures, too."
    return documents, [*parts, said], lines


def _kind_tables(what: str, found: Mapping[int, Mapping[str, Price]]) -> Iterable[Part]:
    """Times, and idle links on the most ranks; as many numbers side by side as 80 columns take."""
    counts = list(found)
    last = found[counts[-1]]
    for first in range(0, len(counts), _COLUMNS):
        some = counts[first : first + _COLUMNS]
        heads = ["ranks", *(f"{n:,}" for n in some), f"idle links\non {counts[-1]:,}"]
        rows = [
            [name, *(show_seconds(found[n][name].time_s) for n in some), f"{one.idle_share:.0%}"]
            for name, one in last.items()
        ]
        redundant = (show_bytes(next(iter(found[n].values())).redundant_bytes) for n in some)
        yield plain_table(f"time of {what}", heads, [*rows, ["redundant", *redundant, ""]], left=1)
    grows = {name: one.time_s / (found[counts[0]][name].time_s or 1) for name, one in last.items()}
    yield f"\ntime on {counts[-1]:,} ranks against {counts[0]:,} (the bars grow by factors):"
    yield from bars(
        grows, lambda n: f"{n:,.0f} times" if n >= 100 else f"{n:.3g} times", is_log=True
    )


def write_chart(file: Path, title: str, lines: Mapping[str, Any]) -> None:
    across = Axis("ranks", "{:,.0f}".format, is_log=True)
    up = Axis("time", show_seconds, True)
    drawn = {name: [p for p in points if p[1] > 0] for name, points in lines.items()}
    if not any(drawn.values()):
        raise BadInput(f"{title} takes no time on any of these numbers of ranks: nothing to draw")
    write_text(file, line_chart(title, across, up, {k: v for k, v in drawn.items() if v}))
