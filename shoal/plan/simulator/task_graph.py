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
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shoal.errors import BadInput
from shoal.plan.simulator.messages import Floats, Longs, MessageNetwork, Ways, message_table
from shoal.plan.simulator.symmetry import Classes, Flow, Move, Round, Symmetry, among
from shoal.plan.sync_price import Agreeing
from shoal.schedules.collectives import Collective


class Task(NamedTuple):
    """`rank` is the one that shows it; `kind` and `track` are those of a trace, "" hides it.

    Of tasks that are alike it stands for so many.
    """

    rank: int
    kind: str = ""
    track: str = "main"
    detail: str = ""
    seconds: float = 0.0
    lane: int = -1  # a computation
    way: int = -1  # a message
    num_bytes: float = 0.0
    repeats: float = 1  # a message that takes so many alphas: a stream of rounds
    stands_for: int = 1

    def of(self, flow: Flow) -> Task:
        """This message for a class of them."""
        return self._replace(rank=flow.src, num_bytes=flow.size * self.num_bytes, way=flow.way)


class TaskGraph:
    """Tasks are numbers; `after` are numbers of tasks that were added before."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.needs: list[int] = []
        self.followers: list[list[tuple[int, int]]] = []  # what each is worth to its followers

    def add(self, task: Task, after: Iterable[int] = (), needs: int | None = None) -> int:
        """With `needs` it begins when so many have ended, of all that those before stand for."""
        number = len(self.tasks)
        before = list(after)
        worth = [1 if needs is None else self.tasks[one].stands_for for one in before]
        for one, counted in zip(before, worth, strict=True):
            self.followers[one].append((number, counted))
        self.tasks.append(task)
        self.needs.append(len(before) if needs is None else min(needs, sum(worth)))
        self.followers.append([])
        return number

    def link(self, before: int, after: int) -> None:
        """Let a task that was added wait for another one too."""
        self.followers[before].append((after, 1))
        self.needs[after] += 1

    def join(self, after: Iterable[int], needs: int | None = None, stands_for: int = 1) -> int:
        return self.add(Task(-1, stands_for=stands_for), after, needs)

    def run(self, network: MessageNetwork, ways: Ways) -> TaskTimes:
        """`ways` has what the messages of tasks take."""
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
                for follower, worth in self.followers[task]:
                    missing[follower] -= worth
                    if missing[follower] <= 0 < missing[follower] + worth:
                        ready.append(follower)
            return ready

        at_s = 0.0
        events = 0
        ready = [number for number, needed in enumerate(missing) if needed == 0]
        while at_s < math.inf:
            messages = []
            events += 1
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
                    elif task.way >= 0:
                        messages.append(number)
                    else:
                        at_once.append(number)
                ready = end(at_once)
            self._send(network, ways, messages)
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
        return TaskTimes(start_s, end_s, events)

    def _send(self, network: MessageNetwork, ways: Ways, messages: list[int]) -> None:
        if messages:
            begun = [self.tasks[number] for number in messages]
            network.start(
                ways.only(np.array([task.way for task in begun])),
                np.array([task.num_bytes for task in begun], np.float64),
                np.array(messages),
                np.array([task.repeats for task in begun]),
            )


class TaskTimes(NamedTuple):
    start_s: Sequence[float]  # by task; NaN for what never began
    end_s: Sequence[float]
    events: int  # moments at which something began or ended

    @property
    def seconds(self) -> float:
        return max((end for end in self.end_s if not math.isnan(end)), default=0.0)


class Collectives:
    """Collectives of ranks as tasks, with the classes of their flows."""

    def __init__(self, graph: TaskGraph, alike: Symmetry, inside: int, is_alone: bool):
        self._graph = graph
        self.alike = alike
        self._inside = inside  # devices of a node; its ranks reduce first
        self._is_alone = is_alone and alike.is_on

    def by_levels(self, ranks: Longs, num_bytes: float, after: Sequence[int], trips: int) -> int:
        """An all-reduce, or in one trip half of it: a reduce-scatter or an all-gather."""
        nodes = self.alike.known(("nodes", int(ranks[0])), lambda: by_node(ranks, self._inside))
        if nodes is None:
            return self._rings("ring", ranks[None], num_bytes, after, trips)
        share = num_bytes / nodes.shape[1]
        done = self._rings("inside", nodes, num_bytes, after, 1)
        done = self._rings("between", nodes.T, share, [done], trips)
        return self._rings("inside", nodes, num_bytes, [done], 1) if trips == 2 else done

    def _rings(
        self, name: str, ranks: Longs, num_bytes: float, after: Sequence[int], trips: int
    ) -> int:
        """Rings in the order of the ranks, as streams; they begin when all have come."""
        begin = self._graph.join(after)
        size = ranks.shape[1]
        if size == 1:
            return begin
        key, (src, dst) = (
            (name, int(ranks[0, 0])),
            (ranks.ravel(), np.roll(ranks, -1, axis=1).ravel()),
        )
        pace = self.alike.known(("pace", key), lambda: self._pace(src, dst, ranks.shape))
        steps = trips * (size - 1)
        kind = "all_reduce" if trips == 2 else "reduce_scatter or all_gather"
        detail, sent_bytes = f"{kind} ring {round(num_bytes)} bytes", steps / size * num_bytes
        sent = Task(0, "reduce", "comm", detail, num_bytes=sent_bytes, repeats=steps * pace)
        return self._follow(key, [(src, dst, np.ones(src.size))], sent, begin)

    def _pace(self, src: Longs, dst: Longs, shape: tuple[int, ...]) -> float:
        """Of the longest alpha of rings, how much a round takes.

        A piece takes the alphas of all hops of its ring one after the other, so the few hops
        between racks or sites delay it once a turn, not once a round.
        """
        alphas_s = self.alike.routes.ways(src, dst).alphas_s.reshape(shape)
        longest_s = float(alphas_s.max())
        return float(alphas_s.mean(axis=1).max()) / longest_s if longest_s else 1.0

    def trees(self, ranks: Longs, num_bytes: float, after: Sequence[int]) -> int:
        """An all-reduce up and down two binary trees over nodes, as streams.

        A node sends and receives twice the vector, as where it is inside of one tree and a leaf of
        the other, here to and from those beside it; its ranks pass it on, there and back.
        """
        key = ("trees", int(ranks[0]))
        move, repeats = self.alike.known(key, lambda: self._tree_streams(ranks))
        detail = f"all_reduce trees {round(num_bytes)} bytes"
        sent = Task(0, "reduce", "comm", detail, num_bytes=num_bytes, repeats=repeats)
        return self._follow(key, [move], sent, self._graph.join(after))

    def _tree_streams(self, ranks: Longs) -> tuple[Move, float]:
        """All streams, and how often each takes its alpha: a port as many as on the longest way."""
        spec, ways = self.alike.routes.cluster.node, self.alike.routes.ways
        nodes = by_node(ranks, spec.devices)
        nodes = ranks[:, None] if nodes is None else nodes
        count, inside = nodes.shape
        heads = nodes[:, :: -(-inside // spec.nics)]
        between = (heads.ravel(), np.roll(heads, -1, axis=0).ravel())
        alphas_s = [ways(*between).alphas_s.max(), 0.0]
        moves = [(*between, np.full(heads.size, 2 / heads.shape[1]))]
        if inside > 1:
            share = np.full(ranks.size, 1 - 1 / inside)
            moves += [(nodes.ravel(), np.roll(nodes, by, axis=1).ravel(), share) for by in (-1, 1)]
            alphas_s[1] = ways(*moves[1][:2]).alphas_s.max()
        way_s = math.ceil(math.log2(count)) * alphas_s[0] + (inside - 1) * alphas_s[1]
        at_port_s = alphas_s[0] + 2 * alphas_s[1]
        src, dst, sizes = (np.concatenate(column) for column in zip(*moves, strict=True))
        return (src, dst, sizes), 2 * way_s / at_port_s if at_port_s else 1.0

    def in_rounds(
        self, collective: Collective, ranks: Longs, num_bytes: float, after: Sequence[int]
    ) -> int:
        """Every message of a schedule; a rank's next round comes when it is through with this."""
        key = (str(collective), int(ranks[0]))
        if self._is_alone:
            return self._by_itself(collective, ranks, num_bytes, after)
        moves = self.alike.known(key, lambda: moves_of(collective, ranks))
        size = collective.chunk_bytes(num_bytes)
        sent = Task(0, "reduce", "comm", collective.name, num_bytes=size)
        return self._follow(key, moves, sent, self._graph.join(after))

    def _by_itself(
        self, collective: Collective, ranks: Longs, num_bytes: float, after: Sequence[int]
    ) -> int:
        """Message by message, once: ranks of a tree have all different pasts, and equal times."""

        def alone() -> tuple[float, Floats]:
            graph, apart = TaskGraph(), Symmetry(self.alike.routes, is_on=False)
            Collectives(graph, apart, 1, is_alone=False).in_rounds(collective, ranks, num_bytes, ())
            network = MessageNetwork(apart.capacities())
            seconds = graph.run(network, apart.ways()).seconds
            return seconds, apart.link_bytes(network.carried_bytes)

        seconds, carried = self.alike.known((str(collective), num_bytes), alone)
        self.alike.carry(carried)
        first, lane = int(ranks[0]), self.alike.devices
        task = Task(first, "reduce", "comm", collective.name, seconds=seconds, lane=lane)
        return self._graph.add(task, after)

    def _follow(self, key: Hashable, moves: Sequence[Move], sent: Task, begin: int) -> int:
        graph, through = self._graph, [begin]
        for one in self.alike.known(("rounds", key), lambda: self._rounds(key, moves), False):
            tasks = [
                graph.add(sent.of(flow), {through[wait] for wait in flow.waits})
                for flow in one.flows
            ]
            through = [through[before] for before in one.before]
            for number, flows in one.arrived:
                come = [tasks[flow] for flow in flows]
                through[number] = come[0] if len(come) == 1 else graph.join(come)
        return graph.join(set(through))

    def _rounds(self, key: Hashable, moves: Sequence[Move]) -> list[Round]:
        ranks = np.unique(np.concatenate([end for move in moves for end in move[:2]]))
        classes = among(ranks, np.zeros(self.alike.devices))
        found = []
        for number, move in enumerate(moves):
            space = (key, "alone") if self._is_alone else 0
            found.append(self.alike.round(space, (key, number), move, classes))
            classes = found[-1].classes
        return found


def moves_of(collective: Collective, ranks: Longs) -> list[Move]:
    """Its rounds, in chunks."""
    table = message_table(collective)
    rows = [table.of_round(number) for number in range(table.num_rounds)]
    return [(ranks[table.src[row]], ranks[table.dst[row]], table.chunks[row]) for row in rows]


def by_node(ranks: Longs, inside: int) -> Longs | None:
    """The ranks of each node, where all nodes have equally many, and more than one."""
    _, sizes = np.unique(ranks // inside, return_counts=True)
    size = int(sizes[0])
    if len(sizes) == 1 or size == 1 or (sizes != size).any():
        return None
    return ranks[np.argsort(ranks // inside, kind="stable")].reshape(-1, size)


class Servers:
    """Parameter servers: pushes, updates, pulls; `lanes` are those of the servers."""

    def __init__(self, graph: TaskGraph, agreeing: Agreeing, alike: Symmetry, ranks: Classes):
        self._graph = graph
        self._how = agreeing
        self._alike = alike
        space = "servers" if alike.is_on else 0
        self._servers = np.array(agreeing.servers, np.int64)
        self.ranks, self._kinds = alike.with_servers(space, ranks, self._servers)
        self._ways = [
            alike.between(space, self.ranks, self._servers, self._kinds, is_push)
            for is_push in (True, False)
        ]
        self._applied: dict[int, list[int]] = {}  # by step: updates that count for staleness

    def push(self, rank: int, num_bytes: float, after: int) -> list[int]:
        """One bucket of a class of ranks to all servers, which have equal shares of it."""
        return self._moved("push", 0, rank, num_bytes, after)

    def _moved(self, kind: str, way: int, rank: int, num_bytes: float, after: int) -> list[int]:
        first = int(self.ranks.firsts[rank])
        sent = Task(first, kind, "comm", num_bytes=num_bytes / len(self._servers))
        flows = self._ways[way][rank]
        return [self._graph.add(sent._replace(way=flow.way), [after]) for flow in flows]

    def pull(
        self, step: int, ranks: Sequence[int], pushed: Sequence[list[int]], num_bytes: float
    ) -> list[int]:
        """Updates; the task after which each class of ranks has new weights."""
        graph, sizes = self._graph, self.ranks.sizes
        arrived = [
            graph.join(own, stands_for=int(sizes[rank]))
            for rank, own in zip(ranks, pushed, strict=True)
        ]
        if self._how.is_async or self._how.staleness is not None:
            updates = [self._update([own], None) for own in arrived]
            self._applied.setdefault(step, []).extend(n for update in updates for n in update)
        else:
            first = self._update(arrived, self._how.quorum)
            updates = [[*first, own] for own in arrived]
        return [
            graph.join(self._moved("pull", 1, rank, num_bytes, graph.join(update)))
            for rank, update in zip(ranks, updates, strict=True)
        ]

    def _update(self, arrived: Sequence[int], needs: int | None) -> list[int]:
        begin = self._graph.join(arrived, needs)
        first = self._alike.devices
        lanes = range(first, first + len(self._kinds))
        seconds = self._how.apply_s
        return [self._graph.add(Task(-1, seconds=seconds, lane=one), [begin]) for one in lanes]

    def before(self, step: int) -> list[int]:
        """What a worker waits for before a step: bounded staleness."""
        staleness = self._how.staleness
        if staleness is None or step - staleness - 1 < 0:
            return []
        return [self._graph.join(self._applied[step - staleness - 1])]
