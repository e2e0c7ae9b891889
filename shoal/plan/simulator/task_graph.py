"""What waits for what, and when it happens: a graph of tasks, run event by event.

A task is a computation in a lane (a lane does one at a time, in the order in which they become
ready), a message between ranks, or a join. A task begins when all tasks before it have ended; one
with `needs` begins when so many of them have, as a parameter server with a quorum does.

A collective among many ranks is simulated as streams: in a ring each rank sends its 2(p-1)/p V to
the next one while it receives, with the alphas of all rounds before. That is the time of the rounds
where links are equal, and the slowest link's where they are not. `in_rounds` has every round of
every algorithm.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shoal.errors import BadInput
from shoal.plan.simulator.messages import MessageNetwork, Routes, message_table
from shoal.plan.sync_price import Agreeing
from shoal.schedules.collectives import Collective
from shoal.schedules.mixing import mixing_for


class Task(NamedTuple):
    """`rank` is the one that shows it; `kind` and `track` are those of a trace, "" hides it."""

    rank: int
    kind: str = ""
    track: str = "main"
    detail: str = ""
    seconds: float = 0.0
    lane: int = -1  # a computation
    src: int = -1  # a message
    dst: int = -1
    num_bytes: float = 0.0
    repeats: int = 1  # a message that takes so many alphas: a stream of rounds


class TaskGraph:
    """Tasks are numbers; `after` are numbers of tasks that were added before."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.needs: list[int] = []
        self.followers: list[list[int]] = []

    def add(self, task: Task, after: Iterable[int] = (), needs: int | None = None) -> int:
        number = len(self.tasks)
        before = list(after)
        for one in before:
            self.followers[one].append(number)
        self.tasks.append(task)
        self.needs.append(len(before) if needs is None else min(needs, len(before)))
        self.followers.append([])
        return number

    def link(self, before: int, after: int) -> None:
        """Let a task that was added wait for another one too."""
        self.followers[before].append(after)
        self.needs[after] += 1

    def join(self, after: Iterable[int], needs: int | None = None) -> int:
        return self.add(Task(-1), after, needs)

    def run(self, routes: Routes, ranks: int) -> TaskTimes:
        network = MessageNetwork(routes, ranks)
        missing = list(self.needs)
        start_s = [math.nan] * len(self.tasks)
        end_s = [math.nan] * len(self.tasks)
        ends: list[tuple[float, int]] = []  # of computations, a heap
        lanes: dict[int, deque[int]] = {}  # the one that runs first

        def end(ended: list[int]) -> list[int]:
            """The tasks that can begin."""
            ready = []
            for task in ended:
                end_s[task] = at_s
                for follower in self.followers[task]:
                    missing[follower] -= 1
                    if missing[follower] == 0:
                        ready.append(follower)
            return ready

        at_s = 0.0
        ready = [number for number, needed in enumerate(missing) if needed == 0]
        while at_s < math.inf:
            messages = []
            while ready:  # joins end at once, so look on from them
                at_once = []
                for number in ready:
                    task = self.tasks[number]
                    start_s[number] = at_s
                    if task.lane >= 0:
                        lane = lanes.setdefault(task.lane, deque())
                        lane.append(number)
                        if len(lane) == 1:
                            heapq.heappush(ends, (at_s + task.seconds, number))
                    elif task.src >= 0 and task.src != task.dst:
                        messages.append(number)
                    else:
                        at_once.append(number)
                ready = end(at_once)
            self._send(network, messages)
            at_s = min(ends[0][0] if ends else math.inf, network.next_end_s())
            ended = network.advance(at_s) if at_s < math.inf else []
            while ends and ends[0][0] <= at_s:
                ended.append(heapq.heappop(ends)[1])
                lane = lanes[self.tasks[ended[-1]].lane]
                lane.popleft()
                if lane:
                    start_s[lane[0]] = at_s
                    heapq.heappush(ends, (at_s + self.tasks[lane[0]].seconds, lane[0]))
            ready = end(ended)
        if any(map(math.isnan, end_s)):
            raise BadInput("the simulated step hangs: a task waits for one that never ends")
        return TaskTimes(start_s, end_s, network.carried_bytes.tolist())

    def _send(self, network: MessageNetwork, messages: list[int]) -> None:
        if messages:
            begun = [self.tasks[number] for number in messages]
            network.start(
                np.array([task.src for task in begun]),
                np.array([task.dst for task in begun]),
                np.array([task.num_bytes for task in begun], np.float64),
                np.array(messages),
                np.array([task.repeats for task in begun]),
            )


class TaskTimes(NamedTuple):
    start_s: Sequence[float]  # by task; NaN for what never began
    end_s: Sequence[float]
    link_bytes: Sequence[float]

    @property
    def seconds(self) -> float:
        return max((end for end in self.end_s if not math.isnan(end)), default=0.0)


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
    return Task(src, "reduce", "comm", detail, 0.0, -1, src, dst, num_bytes, repeats)


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
        size = num_bytes / len(self._how.servers)
        pushes = (Task(rank, "push", "comm", "", 0, -1, rank, to, size) for to in self._how.servers)
        return [self._graph.add(push, [after]) for push in pushes]

    def pull(
        self, step: int, ranks: Sequence[int], pushed: Sequence[list[int]], num_bytes: float
    ) -> list[int]:
        """Updates; the task after which each rank has new weights."""
        graph = self._graph
        arrived = [graph.join(own) for own in pushed]
        if self._how.is_async or self._how.staleness is not None:
            updates = [self._update([own], None) for own in arrived]
            self._applied.setdefault(step, []).extend(n for update in updates for n in update)
        else:
            first = self._update(arrived, self._how.quorum)
            updates = [[*first, own] for own in arrived]
        size = num_bytes / len(self._how.servers)
        pulled = []
        for rank, update in zip(ranks, updates, strict=True):
            begin = graph.join(update)
            ways = (
                Task(rank, "pull", "comm", "", 0, -1, of, rank, size) for of in self._how.servers
            )
            pulled.append(graph.join([graph.add(way, [begin]) for way in ways]))
        return pulled

    def _update(self, arrived: Sequence[int], needs: int | None) -> list[int]:
        begin = self._graph.join(arrived, needs)
        lanes = range(self._lane, self._lane + len(self._how.servers))
        seconds = self._how.apply_s
        return [self._graph.add(Task(-1, seconds=seconds, lane=one), [begin]) for one in lanes]

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
