"""`shoal collectives run`: on real processes; and what collectives cost on 2, 4, 8, … ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from shoal.cluster.units import parse_bytes, show_bytes, show_seconds
from shoal.commands import options
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
_OPS = ("sum", "mean", "max", "min", "prod", "and", "or", "xor")
_COLUMNS = 6  # numbers of ranks side by side, at 80 columns
Numbers = list[int] | list[float]


def run(
    kind: Annotated[str, typer.Argument(help="reduce, all_gather, scan, …; push or pull.")],
    name: Annotated[
        str | None,
        typer.Argument(
            help="ring, tree, …; or FILE.py:FUNCTION of your own.", show_default="the first"
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="A number for each rank: 1,2,3,4; or several: 1,2/3,4 for two ranks."),
    ] = None,
    root: Annotated[int, typer.Option(help="The rank that sends to all or gets all.")] = 0,
    op: Annotated[str, typer.Option(help=f"How numbers are combined: {', '.join(_OPS)}.")] = "sum",
    ranks: Annotated[
        str | None,
        typer.Option(help="Instead of --data: what it costs on 2,4,8,…,1024 ranks."),
    ] = None,
    size: Annotated[str, typer.Option("--bytes", help="Of the vector, with --ranks.")] = "1MB",
    processes: Annotated[
        int | None,
        typer.Option(min=0, help="Measure up to so many ranks.", show_default="one for each core"),
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw times over ranks here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Run one algorithm on real processes, on your own numbers.

    Each rank's numbers before and after, and the bytes that it sent. With --ranks: how time,
    traffic, redundant memory and idle links grow with the ranks, measured where there are cores.
    """
    if (data is None) == (ranks is None):
        raise BadInput("give the numbers of each rank with --data 1,2,3,4, or --ranks 2,4,8")
    if ranks is not None:
        _sweep_one(
            kind, name, ranks, size, cores() if processes is None else processes, svg, as_json
        )
        return
    if svg is not None:
        raise BadInput("--svg draws times over --ranks; `shoal collectives show` draws rounds")
    call = OwnNumbers.read(kind, name, str(data), root, op)
    ranked = call.carried_out()
    document = {**asdict(call), "ranks": ranked}
    show_parts(document, [call.table(ranked), "", call.arrow(ranked)], as_json)


@dataclass(frozen=True)
class OwnNumbers:
    """A call on the user's numbers; `piece`: how many numbers belong to one rank."""

    kind: str
    algorithm: str | None
    root: int
    op: str
    dtype: str
    piece: int
    rows: list[Numbers]

    @staticmethod
    def read(kind: str, name: str | None, data: str, root: int, op: str) -> OwnNumbers:
        """BadInput where the numbers do not suit the collective."""
        if op not in _OPS:
            raise BadInput(f"there is no operator {op!r}; {nearest(op, _OPS)}")
        rows = _rows(data, is_one=kind == "scatter")
        if op == "mean":
            rows = [[float(number) for number in row] for row in rows]
        size = len(rows)
        dtype = "int64" if all(isinstance(n, int) for row in rows for n in row) else "float64"
        if dtype == "float64" and op in ("and", "or", "xor"):
            raise BadInput(f"--op {op} combines whole numbers")
        if size > MOST_PROCESSES:
            raise BadInput(f"--data has {size} ranks: a process each, {MOST_PROCESSES} at most")
        if kind == "scatter":
            rows = [rows[0] if rank == root else [] for rank in range(size)]
        if kind in _MESSAGES:
            if name is not None or size < 2:
                raise BadInput(f"{kind} is a message between two ranks: {kind} --data 1,2")
            algorithm = None
        else:
            algorithm = name or algorithms(kind)[0]
            _built(kind, algorithm, size, root)
        if not 0 <= root < size:
            raise BadInput(f"the root must be one of the ranks 0 to {size - 1}, not {root}")
        numel = len(rows[root])
        if kind in _TAKE_PIECES and numel % size:
            example = "/".join([",".join("1" * size)] * size)
            raise BadInput(
                f"{kind} over {size} ranks needs as many numbers for each of them on every rank, "
                f"such as --data {example}"
            )
        piece = numel // size if kind in _TAKE_PIECES else numel
        return OwnNumbers(kind, algorithm, root, op, dtype, piece, rows)

    def carried_out(self) -> list[dict[str, Any]]:
        """By rank, what real processes had before and after, and sent to whom."""
        found = _in_processes(asdict(self), len(self.rows))
        return [
            {"rank": rank, "has": row, "result": one["found"], "sent_bytes": one["sent"]}
            for rank, (row, one) in enumerate(zip(self.rows, found, strict=True))
        ]

    def table(self, ranked: Sequence[Mapping[str, Any]]) -> Table:
        how = f" by {self.algorithm}" if self.algorithm else ""
        combined = f", {self.op}" if self.op != "sum" else ""
        title = f"{self.kind}{how}{combined} on {counted(len(ranked), 'process', 'processes')}"
        rows = [
            [str(one["rank"]), *map(_shown, (one["has"], one["result"])), _sent(one["sent_bytes"])]
            for one in ranked
        ]
        heads = ["rank", "has", "has then", "sent (counted in the process)"]
        return plain_table(title, heads, rows, left=4)

    def arrow(self, ranked: Sequence[Mapping[str, Any]]) -> str:
        """`[1] [2] [3] [4] → reduce → [10]`."""
        before, after = (
            " ".join(_shown(one[key]) for one in ranked if one[key]) for key in ("has", "result")
        )
        return f"{before} → {self.kind} → {after or 'all have come'}"


def _rows(data: str, is_one: bool) -> list[Numbers]:
    """A row for each rank; the pieces of `is_one` row are as many as its numbers."""
    try:
        rows = [[_number(word) for word in row.split(",")] for row in data.split("/")]
    except ValueError:
        example = "1,2,3,4, or 1,2/3,4 for two ranks with two numbers each"
        raise BadInput(f"--data takes numbers such as {example}, not {data[:40]!r}") from None
    if len(rows) == 1:
        rows = rows * len(rows[0]) if is_one else [[number] for number in rows[0]]
    if len({len(row) for row in rows}) > 1:
        raise BadInput(f"--data {data[:40]}: every rank needs as many numbers as the others")
    return rows  # type: ignore[return-value]


def _number(word: str) -> int | float:
    try:
        found: int | float = int(word)
    except ValueError:
        found = float(word)
    if abs(found) >= 2**63:
        raise ValueError(word)
    return found


def _shown(numbers: Sequence[float] | None) -> str:
    if not numbers:
        return "-"
    words = [str(n) if isinstance(n, int) else f"{n:.6g}" for n in numbers]
    return f"[{', '.join(words)}]"


def _sent(sent: Mapping[str, int]) -> str:
    if not sent:
        return "nothing"
    total = show_bytes(sum(sent.values()))
    peers = sorted(map(int, sent))
    whom = f"rank {peers[0]}" if len(peers) == 1 else f"ranks {', '.join(map(str, peers[:8]))}"
    return f"{total} to {whom}{', …' if len(peers) > 8 else ''}"


def _built(kind: str, name: str, ranks: int, root: int = 0) -> Any:
    if is_user_function(name):
        return proven_collective(name, kind_named(kind).name, ranks)
    return build(kind, name, ranks, root if kind_named(kind).rooted else 0)


def _in_processes(plan: Mapping[str, Any], processes: int) -> list[Any]:
    """What each of so many processes has found, started as training starts workers."""
    from shoal.commands.launching import config_for, run_quietly, strategy_for
    from shoal.launch.here.python_fork import can_fork, load

    with scratch_folder("collective") as folder:
        (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        command = [sys.executable, "-m", "shoal.commands.collective_worker", str(folder)]
        load(command)
        config = config_for(strategy_for(None, processes), device="cpu")
        run_quietly(command, processes, config, forks=can_fork(command))
        files = [folder / f"{rank}.json" for rank in range(processes)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


# ------------------------------------------------------------------------ over numbers of ranks


def _sweep_one(
    kind: str, name: str | None, ranks: str, size: str, most: int, svg: Path | None, as_json: bool
) -> None:
    """One algorithm: a row for each number of ranks."""
    counts, num_bytes = options.parse_counts("--ranks", ranks), parse_bytes(size)
    name = name or algorithms(kind)[0]
    prices = [price(_built(kind, name, count), num_bytes, Link()) for count in counts]
    measured = _measured(kind, name, num_bytes, [n for n in counts if 1 < n <= most])
    heads = ["ranks", "rounds", "time", "measured", "sent/\nrank", "sent\ntotal"]
    rows = [
        [
            f"{one.ranks:,}",
            f"{one.rounds:,}",
            show_seconds(one.time_s),
            show_seconds(measured[one.ranks]) if one.ranks in measured else "-",
            show_bytes(one.sent_largest_bytes),
            show_bytes(one.sent_total_bytes),
            show_bytes(one.redundant_bytes),
            f"{one.idle_share:.0%}",
        ]
        for one in prices
    ]
    title = f"{kind} {name} of {show_bytes(num_bytes)}"
    table = plain_table(title, [*heads, "redundant\nmemory", "idle\nlinks"], rows)
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
    plan = {
        "kind": kind,
        "algorithm": name,
        "root": 0,
        "op": "sum",
        "bytes": num_bytes,
        "divided": kind_named(kind).units(2) > 1,
        "takes_pieces": kind in _TAKE_PIECES,
        "measured": list(counts),
    }
    found = _in_processes(plan, max(counts))
    return dict(zip(counts, found[0]["found"], strict=True))


def sweep(
    kinds: Iterable[str], counts: Sequence[int], num_bytes: int, cost: Link
) -> tuple[dict[str, Any], list[Part], dict[str, list[tuple[float, float]]]]:
    """All algorithms over numbers of ranks: a document, tables, and lines of a chart."""
    parts: list[Part] = []
    listed, lines = [], {}
    for kind in kinds:
        by_count = {
            n: {p.algorithm: p for p in price_all(kind, n, num_bytes, cost)} for n in counts
        }
        names = list(by_count[counts[-1]])
        parts += [*_kind_tables(kind, names, by_count, num_bytes)]
        lines |= {f"{name}": [(n, by_count[n][name].time_s) for n in counts] for name in names}
        listed += [{"kind": kind, "ranks": n, "algorithms": list(map(asdict, found.values()))}
                   for n, found in by_count.items()]  # fmt: skip
    document = {"bytes": num_bytes, **asdict(cost), "collectives": listed}
    return document, parts, lines


def _kind_tables(
    kind: str, names: Sequence[str], by_count: Mapping[int, Mapping[str, Price]], num_bytes: int
) -> Iterable[Part]:
    counts = list(by_count)
    for first in range(0, len(counts), _COLUMNS):
        some = counts[first : first + _COLUMNS]
        heads = ["algorithm", *(f"{n:,}" for n in some)]
        redundant = [show_bytes(by_count[n][names[0]].redundant_bytes) for n in some]
        rows = [[name, *(show_seconds(by_count[n][name].time_s) for n in some)] for name in names]
        rows.append(["redundant", *redundant])
        yield plain_table(
            f"time of {kind} of {show_bytes(num_bytes)} on so many ranks, and redundant memory",
            heads, rows, left=1)  # fmt: skip
        rows = [[name, *(f"{by_count[n][name].idle_share:.0%}" for n in some)] for name in names]
        yield plain_table("\nidle links: share of the time of all ports", heads, rows, left=1)
        yield ""
    least, most = by_count[counts[0]], by_count[counts[-1]]
    grows = {name: most[name].time_s / least[name].time_s for name in names if least[name].time_s}
    yield f"time on {counts[-1]:,} ranks against {counts[0]:,}; as many ▇ more, as many times more:"
    yield from bars(grows, lambda times: f"{times:,.3g} times", is_log=True)
    yield "All of it is computed from the schedules; `shoal collectives run` measures."


def write_chart(file: Path, title: str, lines: Mapping[str, Any]) -> None:
    across, up = Axis("ranks", "{:,.0f}".format, is_log=True), Axis("time", show_seconds, True)
    above = {name: [(x, y) for x, y in points if y > 0] for name, points in lines.items()}
    drawn = {name: points for name, points in above.items() if points}
    if not drawn:
        raise BadInput(f"{title} takes no time on any of these numbers of ranks: nothing to draw")
    write_text(file, line_chart(title, across, up, drawn))
