"""What waits for what, and when it happens: a graph of tasks, run event by event.

A task is a computation in a lane (a lane does one at a time, in the order in which they become
ready), a message between ranks, or a join. A task begins when all tasks before it have ended; one
with `needs` begins when so many of them have, as a parameter server with a quorum does.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shoal.errors import BadInput
from shoal.plan.simulator.messages import MessageNetwork, Routes


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
        return _Run(self, routes, ranks).times()


class TaskTimes(NamedTuple):
    start_s: Sequence[float]  # by task; NaN for what never began
    end_s: Sequence[float]
    link_bytes: Sequence[float]

    @property
    def seconds(self) -> float:
        return max((end for end in self.end_s if not math.isnan(end)), default=0.0)


class _Run:
    def __init__(self, graph: TaskGraph, routes: Routes, ranks: int):
        self._graph = graph
        self._network = MessageNetwork(routes, ranks)
        self._missing = list(graph.needs)
        self._start_s = [math.nan] * len(graph.tasks)
        self._end_s = [math.nan] * len(graph.tasks)
        self._ends: list[tuple[float, int]] = []  # of computations, a heap
        self._queues: dict[int, deque[int]] = {}  # by lane, the one that runs first
        self._messages: list[int] = []  # that begin at this moment

    def times(self) -> TaskTimes:
        self._begin([n for n, missing in enumerate(self._missing) if missing == 0], 0.0)
        while True:
            next_s = self._ends[0][0] if self._ends else math.inf
            at_s = min(next_s, self._network.next_end_s())
            if at_s == math.inf:
                break
            ended = self._network.advance(at_s)
            while self._ends and self._ends[0][0] <= at_s:
                task = heapq.heappop(self._ends)[1]
                ended.append(task)
                self._leave_lane(task, at_s)
            self._end(ended, at_s)
        if any(map(math.isnan, self._end_s)):
            raise BadInput("the simulated step hangs: a task waits for one that never ends")
        carried: list[float] = self._network.carried_bytes.tolist()
        return TaskTimes(self._start_s, self._end_s, carried)

    def _end(self, ended: list[int], at_s: float) -> None:
        """What ended lets others begin; joins end at once, so look on from them."""
        ready: list[int] = []
        for task in ended:
            self._end_s[task] = at_s
            for follower in self._graph.followers[task]:
                self._missing[follower] -= 1
                if self._missing[follower] == 0:
                    ready.append(follower)
        self._begin(ready, at_s)

    def _begin(self, ready: list[int], at_s: float) -> None:
        tasks = self._graph.tasks
        at_once = []
        for number in ready:
            task = tasks[number]
            self._start_s[number] = at_s
            if task.lane >= 0:
                self._enter_lane(number, task, at_s)
            elif task.src >= 0 and task.src != task.dst:
                self._messages.append(number)
            else:
                at_once.append(number)
        if at_once:
            self._end(at_once, at_s)
        self._send()

    def _send(self) -> None:
        if not self._messages:
            return
        begun = [self._graph.tasks[number] for number in self._messages]
        self._network.start(
            np.array([task.src for task in begun]),
            np.array([task.dst for task in begun]),
            np.array([task.num_bytes for task in begun], np.float64),
            np.array(self._messages),
            np.array([task.repeats for task in begun]),
        )
        self._messages = []

    def _enter_lane(self, number: int, task: Task, at_s: float) -> None:
        queue = self._queues.setdefault(task.lane, deque())
        queue.append(number)
        if len(queue) == 1:
            heapq.heappush(self._ends, (at_s + task.seconds, number))

    def _leave_lane(self, number: int, at_s: float) -> None:
        queue = self._queues[self._graph.tasks[number].lane]
        queue.popleft()
        if queue:
            following = queue[0]
            self._start_s[following] = at_s
            heapq.heappush(self._ends, (at_s + self._graph.tasks[following].seconds, following))
