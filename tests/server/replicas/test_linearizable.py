"""Strong consistency: what real clients see is linearizable, whatever is lost between them.

All weights of a shard are one key. A push adds 4**n to one of them, twelve pushes to each: float32
holds such sums exactly, and a pull shows which pushes it contains.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.server.client.client import Client
from shoal.server.consistency import Rule
from shoal.server.messages import Commit
from tests.server.chain.history import NEVER, Added, Observed, violation
from tests.server.coordinator.helpers import until
from tests.server.replicas.processes import COORDINATOR, Processes
from tests.server.replicas.world import element_of, pulled, world

PER_ELEMENT = 12
LIMIT_S = 60.0


class History:
    """Of all clients; their clocks are one."""

    def __init__(self) -> None:
        self.added: list[Added] = []
        self.observed: list[Observed] = []
        self._lock = threading.Lock()
        self._begun: dict[int, float] = {}

    def push(self, client: Client, step: int) -> None:
        with self._lock:
            number = len(self._begun)
            self._begun[number] = time.monotonic()
        verdict = push_number(client, number, step)
        with self._lock:
            begun_s = self._begun[number]
            if verdict == "admitted":
                self.added.append(Added(number, begun_s, time.monotonic()))
            else:  # a worker that is far behind skips a step
                self._begun[number] = NEVER

    def pull(self, client: Client) -> None:
        begun_s = time.monotonic()
        value = value_of(pulled(client))
        ended_s = time.monotonic()
        with self._lock:
            self.observed.append(Observed(value, begun_s, ended_s))

    def violation(self) -> str | None:
        known = {added.push for added in self.added}
        unanswered = [
            Added(number, begun_s, NEVER)
            for number, begun_s in self._begun.items()
            if number not in known and begun_s < NEVER
        ]
        return violation([*self.added, *unanswered], self.observed)


def push_number(client: Client, number: int, step: int) -> str:
    element, digit = divmod(number, PER_ELEMENT)
    client.out.zero_()
    client.out[0, element_of(client, element)] = 4.0**digit
    client.push(slice(0, client.size))
    ack = client.commit(Commit(step, 0, 1.0), torch.ones(1, 1 + client.specs[0].parameters))
    client.settle(ack.position)
    client.wait_settled()
    return ack.verdict


def value_of(weights: list[float]) -> int:
    """As the checker takes it: base-4 digits, one for each push."""
    return sum(round(-weight) << 2 * PER_ELEMENT * i for i, weight in enumerate(weights))


def push_and_pull(history: History, make: Callable[[], Client], pushes: int) -> None:
    """By turns."""
    with closing(make()) as client:
        for step in range(pushes):
            history.push(client, step)
            for _ in range(2):
                history.pull(client)


def test_what_clients_see_around_the_loss_of_a_head_is_linearizable() -> None:
    history = History()
    rule = Rule(2, asynchronous=True)
    with world() as made, ThreadPoolExecutor(2) as pool:
        makes = [partial(made.client, rank, rule) for rank in range(2)]
        working = [pool.submit(push_and_pull, history, make, 8) for make in makes]
        until(lambda: len(history.added) >= 8, "half of the pushes")
        made.crash(0, made.head())
        for worker in working:
            worker.result(LIMIT_S)
    assert len(history.added) == 16
    assert history.violation() is None
    assert with_a_stale_read(history).violation() is not None


def with_a_stale_read(history: History) -> History:
    """The last read gets what one in the middle has seen."""
    last = max(history.observed, key=lambda read: read.invoked_s)
    stale = sorted(read.value for read in history.observed)[len(history.observed) // 2]
    assert stale != last.value
    history.observed[history.observed.index(last)] = replace(last, value=stale)
    return history


@pytest.mark.whole
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(3))
def test_processes_that_are_killed_and_stopped_show_linearizable_histories(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    history = History()
    with closing(Processes(tmp_path)) as made, ThreadPoolExecutor(3) as pool:
        makes = [partial(made.client, rank, workers=3) for rank in range(3)]
        working = [pool.submit(push_and_pull, history, make, 70) for make in makes]
        for done in range(30, 180, 30):
            until(lambda: len(history.added) >= done, "pushes")  # noqa: B023
            victim: Any = chance.choice([*made.members(), COORDINATOR])
            if chance.random() < 0.5 and victim != COORDINATOR:
                made.signal(victim, signal.SIGSTOP)
                until(lambda: len(history.added) >= done + 15, "pushes without it")  # noqa: B023
                made.signal(victim, signal.SIGCONT)
            else:
                made.signal(victim, signal.SIGKILL)
                made.wait_dead(victim)
                made.start(victim)
        for worker in working:
            worker.result(LIMIT_S)
    assert history.violation() is None
    assert len(history.observed) > 400
