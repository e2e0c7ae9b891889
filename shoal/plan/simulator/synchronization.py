"""How replicas agree in a simulated step: messages and waits, by way.

A collective among many ranks is simulated as streams: in a ring each rank sends its 2(p-1)/p V to
the next one while it receives, with the alphas of all rounds before. That is the time of the rounds
where links are equal, and the slowest link's where they are not. `collectives.py` has every
round of every algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.plan.simulator.collectives import message_table
from shoal.plan.simulator.task_graph import Task, TaskGraph
from shoal.plan.sync_price import Agreeing
from shoal.schedules.collectives import Collective
from shoal.schedules.mixing import mixing_for


def by_levels(
    graph: TaskGraph,
    ranks: Sequence[int],
    num_bytes: float,
    after: Sequence[int],
    inside: int,
    trips: int = 2,
) -> int:
    """An all-reduce, or in one trip half of it: a reduce-scatter or an all-gather."""
    nodes = _by_node(ranks, inside)
    if nodes is None:
        return ring(graph, ranks, num_bytes, after, trips)
    slices = zip(*nodes, strict=True)
    share = num_bytes / len(nodes[0])
    done = [ring(graph, node, num_bytes, after, 1) for node in nodes]
    done = [ring(graph, column, share, done, trips) for column in slices]
    if trips == 2:
        done = [ring(graph, node, num_bytes, done, 1) for node in nodes]
    return graph.join(done)


def in_rounds(
    graph: TaskGraph, collective: Collective, ranks: Sequence[int], num_bytes: float, begin: int
) -> int:
    """Every message of a schedule; a rank's next round comes when it is through with this one."""
    table = message_table(collective)
    chunk = collective.chunk_bytes(num_bytes)
    through = [begin] * len(ranks)
    for number in range(table.num_rounds):
        rows = table.of_round(number)
        of_rank: dict[int, list[int]] = {}
        columns = (table.src[rows].tolist(), table.dst[rows].tolist(), table.chunks[rows].tolist())
        for src, dst, chunks in zip(*columns, strict=True):
            sent = _reduced(ranks[src], ranks[dst], chunks * chunk, collective.name, 1)
            message = graph.add(sent, {through[src], through[dst]})
            of_rank.setdefault(src, []).append(message)
            of_rank.setdefault(dst, []).append(message)
        for rank, messages in of_rank.items():
            through[rank] = graph.join(messages)
    return graph.join(set(through))


def _reduced(src: int, dst: int, num_bytes: float, detail: str, repeats: int) -> Task:
    return Task(
        src, "reduce", "comm", detail, src=src, dst=dst, num_bytes=num_bytes, repeats=repeats
    )


def ring(
    graph: TaskGraph, ranks: Sequence[int], num_bytes: float, after: Sequence[int], trips: int
) -> int:
    """A ring in the order of the ranks, as streams; it begins when all have come."""
    size = len(ranks)
    begin = graph.join(after)
    if size == 1:
        return begin
    rounds = trips * (size - 1)
    kind = "all_reduce" if trips == 2 else "reduce_scatter or all_gather"
    detail = f"{kind} ring {round(num_bytes)} bytes"
    size_bytes = rounds / size * num_bytes
    streams = [
        graph.add(_reduced(src, dst, size_bytes, detail, rounds), [begin])
        for src, dst in zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    ]
    return graph.join(streams)


def _by_node(ranks: Sequence[int], inside: int) -> list[list[int]] | None:
    """The ranks of each node, where all nodes have equally many, and more than one."""
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // inside, []).append(rank)
    sizes = {len(members) for members in nodes.values()}
    if len(nodes) == 1 or len(sizes) > 1 or sizes == {1}:
        return None
    return list(nodes.values())


class Servers:
    """Parameter servers: pushes, updates, pulls; `lanes` are those of the servers."""

    def __init__(self, graph: TaskGraph, agreeing: Agreeing, first_lane: int):
        self._graph = graph
        self._how = agreeing
        self._lane = first_lane
        self._applied: dict[int, list[int]] = {}  # by step: updates that count for staleness

    def push(self, rank: int, num_bytes: float, after: int) -> list[int]:
        """One bucket to all servers, which have equal shares of it."""
        servers = self._how.servers
        share = num_bytes / len(servers)
        return [
            self._graph.add(
                Task(rank, "push", "comm", src=rank, dst=host, num_bytes=share), [after]
            )
            for host in servers
        ]

    def pull(
        self, step: int, ranks: Sequence[int], pushed: Sequence[list[int]], num_bytes: float
    ) -> list[int]:
        """Updates; the task after which each rank has new weights."""
        graph = self._graph
        if self._how.is_async or self._how.staleness is not None:
            updates = [self._update([graph.join(own)], None) for own in pushed]
            self._applied.setdefault(step, []).extend(n for update in updates for n in update)
            pairs = zip(ranks, updates, strict=True)
            return [self._fetch(rank, num_bytes, update) for rank, update in pairs]
        arrived = [graph.join(own) for own in pushed]
        update = self._update(arrived, self._how.quorum)
        pairs_own = zip(ranks, arrived, strict=True)
        return [self._fetch(rank, num_bytes, [*update, own]) for rank, own in pairs_own]

    def _update(self, arrived: Sequence[int], needs: int | None) -> list[int]:
        begin = self._graph.join(arrived, needs)
        lanes = range(self._lane, self._lane + len(self._how.servers))
        seconds = self._how.apply_s
        return [self._graph.add(Task(-1, seconds=seconds, lane=one), [begin]) for one in lanes]

    def _fetch(self, rank: int, num_bytes: float, after: Sequence[int]) -> int:
        share = num_bytes / len(self._how.servers)
        begin = self._graph.join(after)
        parts = [
            self._graph.add(
                Task(rank, "pull", "comm", src=host, dst=rank, num_bytes=share), [begin]
            )
            for host in self._how.servers
        ]
        return self._graph.join(parts)

    def before(self, step: int) -> list[int]:
        """What a worker waits for before a step: bounded staleness."""
        staleness = self._how.staleness
        if staleness is None or step - staleness - 1 < 0:
            return []
        return [self._graph.join(self._applied[step - staleness - 1])]


def gossip(
    graph: TaskGraph,
    ranks: Sequence[int],
    num_bytes: float,
    after: Sequence[int],
    topology: str,
    step: int,
) -> list[int]:
    """Weights go to the neighbors in a graph; each rank waits for those it hears."""
    mixing = mixing_for(topology, len(ranks))
    arriving: list[list[int]] = [[own] for own in after]
    for place, rank in enumerate(ranks):
        for other in mixing.listeners(place, step):
            sent = Task(rank, "send", "comm", src=rank, dst=ranks[other], num_bytes=num_bytes)
            arriving[other].append(graph.add(sent, [after[place]]))
    return [graph.join(parts) for parts in arriving]
