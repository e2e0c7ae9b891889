"""The spans of a run as Chakra nodes.

On each rank computing is a chain of nodes. An operation that begins while the rank computes cuts
that node in two and depends on the first part, so that it can run beside the second one; what
follows a wait depends on what was waited for. Waits and idle time are left out: a simulator finds
its own.

    main   [ backward             ][ wait ][ update ]
    comm          [ all_reduce            ]

    backward 0 -> all_reduce ---------> update
               -> backward 1 ---------^
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.errors import BadInput
from shoal.observe.trace import COMPUTE, INJECTED, ISSUED, STEP, WAIT, Span
from shoal.plan.chakra.nodes import COMM_TYPES, ChakraNode, NodeType

_COLLECTIVE = re.compile(r"([a-z_]+)\b.*?(\d+) bytes(?: among ([\d,]+))?")
_MESSAGE = re.compile(r"(send|receive) (\d+) bytes (?:to|from) (\d+)")
SERVERS = ("push", "pull")


class TracedGroup(NamedTuple):
    """Ranks that have a name of their own in the trace."""

    name: str
    ranks: tuple[int, ...]


@dataclass
class ChakraTrace:
    nodes_by_rank: dict[int, list[ChakraNode]] = field(default_factory=dict)
    groups: list[TracedGroup] = field(default_factory=list)
    lonely: int = 0  # messages with one end in the trace; left out


def to_chakra(spans_by_rank: dict[int, list[Span]], step: int | None = None) -> ChakraTrace:
    """The nodes of all ranks; `step` takes the spans of one step alone."""
    if step is not None:
        spans_by_rank = {rank: _within(spans, step) for rank, spans in spans_by_rank.items()}
    if not any(spans_by_rank.values()):
        what = "no spans" if step is None else f"no step {step}"
        raise BadInput(f"the trace has {what}")
    trace = ChakraTrace()
    messages = _Messages(spans_by_rank)
    trace.lonely = messages.lonely
    names: dict[tuple[int, ...], str] = {}
    for rank, spans in spans_by_rank.items():
        builder = _RankNodes(rank, len(spans_by_rank), messages, names)
        trace.nodes_by_rank[rank] = builder.build(spans)
    trace.groups = [TracedGroup(name, ranks) for ranks, name in names.items()]
    return trace


def _within(spans: list[Span], step: int) -> list[Span]:
    """The spans of one step, which also has the loading of its batch."""
    steps = [span for span in spans if span.kind == STEP]
    for number, span in enumerate(steps):
        if span.detail == f"step {step}":
            begin = steps[number - 1].end_ns if number else span.start_ns
            return [one for one in spans if begin <= one.start_ns and one.end_ns <= span.end_ns]
    return []


class _Messages:
    """Gives both ends of a message one tag: the k-th of a size from one rank to another."""

    def __init__(self, spans_by_rank: dict[int, list[Span]]):
        counts: dict[tuple[int, int, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for rank, spans in spans_by_rank.items():
            for span in spans:
                found = message_of(rank, span)
                if found is not None:
                    counts[found[1:]][found[0]] += 1
        self._complete = {key: min(both["send"], both["receive"]) for key, both in counts.items()}
        self.lonely = sum(abs(both["send"] - both["receive"]) for both in counts.values())
        self._first = {}
        total = 1
        for key, count in self._complete.items():
            self._first[key] = total
            total += count
        self._seen: dict[tuple[str, int, int, int], int] = defaultdict(int)

    def tag(self, role: str, key: tuple[int, int, int]) -> int | None:
        """The tag of the next message; None where its other end is not in the trace."""
        number = self._seen[(role, *key)]
        self._seen[(role, *key)] += 1
        return self._first[key] + number if number < self._complete[key] else None


def message_of(rank: int, span: Span) -> tuple[str, int, int, int] | None:
    """(send or receive, source, destination, bytes) where the span hands over a message."""
    found = _MESSAGE.fullmatch(span.detail)
    if found is None or span.track != ISSUED:
        return None
    peer = int(found[3])
    src, dst = (rank, peer) if found[1] == "send" else (peer, rank)
    return found[1], src, dst, int(found[2])


class _RankNodes:
    """Builds the nodes of one rank from its spans."""

    def __init__(
        self, rank: int, world: int, messages: _Messages, names: dict[tuple[int, ...], str]
    ):
        self._rank = rank
        self._world = world
        self._messages = messages
        self._names = names
        self._nodes: list[ChakraNode] = []
        self._last: list[int] = []  # the last node that computes
        self._joined: list[int] = []  # what the computing thread has waited for since
        self._running: dict[str, list[int]] = defaultdict(list)  # by detail

    def build(self, spans: list[Span]) -> list[ChakraNode]:
        starts = sorted(span.start_ns for span in spans if self._communicates(span))
        moments: list[tuple[int, int, Span]] = []
        for span in spans:
            if span.track == "main" and span.kind in (*COMPUTE, INJECTED):
                moments += [(part.start_ns, 2, part) for part in _cut(span, starts)]
            elif self._communicates(span):
                moments.append((span.start_ns, 1, span))
            elif span.kind == WAIT:
                moments.append((span.end_ns, 0, span))
        for _, _, span in sorted(moments, key=lambda moment: moment[:2]):
            self._add(span)
        return self._nodes

    def _communicates(self, span: Span) -> bool:
        if span.kind in SERVERS:
            raise BadInput(
                f"rank {self._rank} pushes to and pulls from parameter servers, which have no "
                "trace of their own, so Chakra's nodes cannot tell what happens"
            )
        if span.track == "comm" and span.kind == "send" and not _MESSAGE.fullmatch(span.detail):
            raise BadInput(
                f"rank {self._rank} sends {span.detail}, and the trace does not say to which rank: "
                "simulated pipelines cannot be exported"
            )
        is_collective = span.track == "comm" and span.kind == "reduce"
        return is_collective or message_of(self._rank, span) is not None

    def _add(self, span: Span) -> None:
        if span.kind == WAIT:
            self._join(span.detail)
        elif span.track == "main":
            self._compute(span)
        elif span.track == ISSUED:
            self._message(span)
        else:
            self._collective(span)

    def _join(self, detail: str) -> None:
        waited = [detail] if detail else list(self._running)
        for one in waited:
            if self._running[one]:
                self._joined.append(self._running[one].pop(0))

    def _compute(self, span: Span) -> None:
        node = self._node(span, NodeType.COMPUTE, f"{span.kind} {span.detail}".strip())
        node.attributes = {"is_cpu_op": False}
        self._last = [node.id]
        self._joined = []

    def _message(self, span: Span) -> None:
        found = message_of(self._rank, span)
        assert found is not None
        role, src, dst, size = found
        tag = self._messages.tag(role, (src, dst, size))
        if tag is None:
            return
        kind = NodeType.SEND if role == "send" else NodeType.RECEIVE
        node = self._node(span, kind, span.detail)
        node.attributes = {
            "is_cpu_op": False,
            "comm_size": size,
            "comm_src": src,
            "comm_dst": dst,
            "comm_tag": tag,
        }
        if kind is NodeType.RECEIVE:  # a send is complete once it is handed over
            self._running[span.detail].append(node.id)

    def _collective(self, span: Span) -> None:
        found = _COLLECTIVE.match(span.detail)
        if found is None or found[1] not in COMM_TYPES:
            raise BadInput(
                f"rank {self._rank} has the operation {span.detail!r}, and Chakra has nodes for "
                f"{', '.join(COMM_TYPES)} with their bytes"
            )
        node = self._node(span, NodeType.COLLECTIVE, span.detail)
        node.attributes = {
            "is_cpu_op": False,
            "comm_type": COMM_TYPES[found[1]],
            "comm_size": int(found[2]),
        }
        ranks = tuple(map(int, found[3].split(","))) if found[3] else ()
        if 0 < len(ranks) < self._world:
            node.attributes["pg_name"] = self._names.setdefault(ranks, str(len(self._names) + 1))
        self._running[span.detail].append(node.id)

    def _node(self, span: Span, kind: NodeType, name: str) -> ChakraNode:
        after = sorted({*self._last, *self._joined})
        duration_us = round((span.end_ns - span.start_ns) / 1e3)
        start_us = max(0, round(span.start_ns / 1e3))
        node = ChakraNode(len(self._nodes), name, kind, after, start_us, duration_us)
        self._nodes.append(node)
        return node


def _cut(span: Span, starts: list[int]) -> list[Span]:
    """The span in parts, cut where an operation begins inside of it."""
    inside = sorted({at for at in starts if span.start_ns < at < span.end_ns})
    edges = [span.start_ns, *inside, span.end_ns]
    if not inside:
        return [span]
    return [span._replace(start_ns=begin, end_ns=end) for begin, end in itertools.pairwise(edges)]
