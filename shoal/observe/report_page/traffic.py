"""Bytes from process to process, and over the links of a cluster."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from shoal.cluster import Cluster
from shoal.cluster.drawing import levels
from shoal.cluster.units import show_bytes
from shoal.errors import BadInput
from shoal.observe.report_page.record import RecordedRun
from shoal.runtime import trace
from shoal.runtime.trace import Process, Span, name_of
from shoal.schedules.collectives import Collective, Transfer
from shoal.schedules.collectives.catalog import build

Traffic = Mapping[tuple[Process, Process], float]
_KINDS = ("reduce_scatter", "all_gather", "broadcast", "all_to_all")  # others: as an all-reduce
_FIRST = {"broadcast": "tree", "all_to_all": "shift"}  # others: a ring
_MOST_RANKS = 512  # of a collective whose schedule is followed
_MOST_NAMES = 256  # of a matrix
_GROUP = re.compile(r"(\d+(?:,\d+)*) #")


def traffic_of(run: RecordedRun) -> tuple[Traffic, bool]:
    """Bytes by sender and receiver, in training; whether some of them are spread by a schedule."""
    found: dict[tuple[Process, Process], float] = defaultdict(float)
    is_spread = False
    named = run.strategy.sync_for(run.workers).collective_algorithm
    for process in run.spans:
        for span in run.trained(process):
            if not span.bytes:
                continue
            if span.peer is not None:
                found[process, span.peer] += span.bytes
            elif (members := _members(span)) and isinstance(process, int) and process in members:
                is_spread = True
                word = span.detail.split(" ")[0].replace("-", "_")
                kind = word if word in _KINDS else "all_reduce"
                own = run.own.collective if len(members) == run.replicas else ()
                shares = _shares(kind, named or "", len(members), own)[members.index(process)]
                for peer, share in shares.items():
                    found[process, members[peer]] += span.bytes * share
    return {pair: size for pair, size in found.items() if size}, is_spread


def _members(span: Span) -> list[int]:
    match = _GROUP.match(span.call) if span.track != trace.ISSUED else None
    return [] if match is None else [int(rank) for rank in match[1].split(",")]


@cache
def _shares(
    kind: str, name: str, ranks: int, own: Sequence[Sequence[Transfer]] = ()
) -> list[dict[int, float]]:
    """Of what a rank sends, the share that each other rank gets; `own`: of an all-reduce.

    Many ranks stand in a ring, whatever the name.
    """
    if ranks > _MOST_RANKS:
        return [{(rank + 1) % ranks: 1.0} for rank in range(ranks)]
    rounds = own if kind == "all_reduce" and own else _schedule(kind, name, ranks).rounds
    sent: list[dict[int, float]] = [defaultdict(float) for _ in range(ranks)]
    for transfers in rounds:
        for one in transfers:
            if one.src != one.dst:
                sent[one.src][one.dst] += 1.0
    return [{dst: n / sum(row.values()) for dst, n in row.items()} for row in sent]


def _schedule(kind: str, name: str, ranks: int) -> Collective:
    try:
        return build(kind, name or _FIRST.get(kind, "ring"), ranks)
    except BadInput:  # the name is that of an all-reduce
        return build(kind, _FIRST.get(kind, "ring"), ranks)


def matrix(run: RecordedRun) -> list[dict[str, Any]]:
    """Nothing where nothing was sent."""
    traffic, is_spread = traffic_of(run)
    if not traffic:
        return []
    talking = {process for pair in traffic for process in pair}
    lost = sorted(talking - {*run.spans}, key=str)  # a process that was killed has no spans
    names = [process for process in [*run.spans, *lost] if process in talking]
    if len(names) > _MOST_NAMES:
        return []
    rows = [[traffic.get((a, b), 0.0) for b in names] for a in names]
    note = "Counted where messages, pushes and pulls are sent."
    if is_spread:
        named = run.named.sync_for(run.workers).collective_algorithm
        used = "ring" if run.replicas > _MOST_RANKS else named or "ring (broadcasts: tree)"
        note += (
            " The bytes of collectives are those of the trace; to whom they go is computed from "
            f"the schedule {used}, not observed."
        )
    return [
        {
            "type": "matrix",
            "names": [name_of(one) for one in names],
            "rows": rows,
            "texts": [[show_bytes(size) if size else "" for size in row] for row in rows],
            "corner": "from \\ to",
            "note": note,
        }
    ]


def link_loads(run: RecordedRun, cluster: Cluster) -> list[list[str]]:
    """A row for each level of the cluster: what crosses it, and of what it could carry."""
    known = levels(cluster)
    crossing = dict.fromkeys((level.name for level in known), 0.0)
    for pair, size in traffic_of(run)[0].items():
        level_name = _level(cluster, *(_node(run, cluster, process) for process in pair))
        if level_name in crossing:
            crossing[level_name] += size
    first, last = run.training
    seconds = max(1, last - first) / 1e9
    rows = []
    for level in known:
        rate = crossing[level.name] / seconds
        share = rate / (level.line_bytes_per_s * level.links)
        rates = [f"{show_bytes(rate)}/s", f"{show_bytes(level.line_bytes_per_s)}/s × {level.links}"]
        rows.append([level.name, level.link, show_bytes(crossing[level.name]), *rates])
        rows[-1].append(f"{share:.1%}" if share >= 5e-4 or not share else "< 0.1%")
    return rows


def _node(run: RecordedRun, cluster: Cluster, process: Process) -> int:
    """Of a server: that of the worker that hosts it; else nodes have servers in turn."""
    if isinstance(process, int):
        return process // cluster.node.devices
    number = sum(map(int, re.findall(r"\d+", process)))  # copies of a shard are apart
    is_hosted = not run.strategy.sync_for(run.workers).server_processes
    return number // cluster.node.devices if is_hosted else number % cluster.nodes


def _level(cluster: Cluster, a: int, b: int) -> str:
    """The outermost level that a message between two nodes crosses."""
    if a == b:
        return "node"
    per_rack = cluster.nodes_per_rack or cluster.nodes
    return "rack" if a // per_rack == b // per_rack else "spine"
