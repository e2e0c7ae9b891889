"""Fibers, time, and what waits in it."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from shoal.errors import ShoalError
from shoal.rehearse.random_state import RandomState
from shoal.rehearse.virtual_time import VirtualTime
from shoal.runtime import clock
from shoal.runtime.waits import Backoff, Periodic
from tests.rehearse.worlds import in_virtual_time


def test_time_passes_only_where_all_wait() -> None:
    log: list[tuple[float, str]] = []

    def sleeper(name: str, seconds: float) -> None:
        for _ in range(2):
            clock.sleep(seconds)
            log.append((clock.monotonic(), name))

    def body(time: VirtualTime) -> float:
        threads = [clock.Thread(target=sleeper, args=(n, s)) for n, s in (("a", 3.0), ("b", 2.0))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.now_s

    assert in_virtual_time(body) == 6.0
    assert log == [(2.0, "b"), (3.0, "a"), (4.0, "b"), (6.0, "a")]


def test_a_thread_is_joined_for_so_long() -> None:
    def body(time: VirtualTime) -> list[tuple[float, bool]]:
        thread, found = clock.Thread(target=clock.sleep, args=(3.0,)), []
        thread.start()
        for timeout in (2.0, 2.0, None):
            thread.join(timeout)
            found.append((time.now_s, thread.is_alive()))
        return found

    assert in_virtual_time(body) == [(2.0, True), (3.0, False), (3.0, False)]


def test_a_lock_goes_to_the_one_that_waits_longest() -> None:
    taken: list[int] = []

    def body(time: VirtualTime) -> None:
        lock = clock.Lock()

        def take(number: int) -> None:
            clock.sleep(number)
            with lock:
                clock.sleep(10)
                taken.append(number)

        threads = [clock.Thread(target=take, args=(n,)) for n in (3, 1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.now_s == 31.0

    in_virtual_time(body)
    assert taken == [1, 2, 3]


def test_a_condition_is_waited_for_up_to_its_limit() -> None:
    def body(time: VirtualTime) -> None:
        condition = clock.Condition()
        with condition:
            assert not condition.wait(1.5)
            assert not condition.wait_for(lambda: False, 2.0)
        assert time.now_s == 3.5

        def notify() -> None:
            clock.sleep(1.0)
            with condition:
                condition.notify_all()

        clock.Thread(target=notify).start()
        with condition:
            assert condition.wait(100.0)
        assert time.now_s == 4.5

    in_virtual_time(body)


def test_a_fiber_is_woken_when_what_it_waits_for_holds() -> None:
    def main(time: VirtualTime) -> tuple[int, list[str]]:
        condition, count, looked = clock.Condition(), 0, []

        def has_come() -> bool:
            looked.append(time.current.name)
            return count == 3

        def wait() -> None:
            with condition:
                condition.wait_for(has_come)

        fiber = time.spawn("waits", wait, None)
        time.sleep(1.0)
        for count in (1, 2, 3):  # noqa: B007 - `has_come` reads it
            with condition:
                condition.notify_all()
        time.join(fiber)
        return count, looked

    count, looked = in_virtual_time(main)
    assert (count, looked) == (3, ["waits", *["rehearsal"] * 3, "waits"])


def test_an_event_that_was_set_is_not_waited_for() -> None:
    def body(time: VirtualTime) -> None:
        event = clock.Event()
        assert not event.wait(1.0)
        event.set()
        assert event.wait() and event.is_set()
        assert time.now_s == 1.0

    in_virtual_time(body)


def test_what_polls_polls_in_virtual_time() -> None:
    def body(time: VirtualTime) -> None:
        pause = Backoff(1.0, 4.0)
        for _ in range(4):
            pause()
        assert time.now_s == 1.0 + 2.0 + 4.0 + 4.0

    in_virtual_time(body)


def test_what_acts_periodically_may_end_before_it_has_started() -> None:
    def body(time: VirtualTime) -> None:
        acted: list[float] = []
        never = Periodic("watch", 1.0, lambda: acted.append(time.now_s))
        never.close(5.0)
        never.start()  # it sees that it is over
        with Periodic("other", 1.0, lambda: acted.append(time.now_s)):
            clock.sleep(2.5)
        assert acted == [1.0, 2.0]

    in_virtual_time(body)


def test_a_rehearsal_that_hangs_says_who_waits_for_what() -> None:
    def body(time: VirtualTime) -> None:
        time.spawn("rank 1", lambda: time.park("a message of rank 0"), None)
        clock.Event().wait()

    with pytest.raises(ShoalError, match=r"hangs at 0.000 s.*rank 1 for a message of rank 0"):
        in_virtual_time(body)


def test_the_error_of_a_fiber_ends_the_rehearsal() -> None:
    def body(time: VirtualTime) -> None:
        def fail() -> None:
            clock.sleep(1.0)
            raise ValueError("of rank 1")

        fiber = time.spawn("rank 1", fail, None)
        time.spawn("rank 2", clock.Event().wait, None)  # would wait without end
        time.join(fiber)

    with pytest.raises(ValueError, match="of rank 1"):
        in_virtual_time(body)


def test_each_worker_draws_its_own_random_numbers() -> None:
    drawn: dict[int, list[Any]] = {}

    def draw(rank: int) -> None:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        drawn[rank] = []
        for _ in range(3):
            clock.sleep(1.0)  # the others draw meanwhile
            host = random.random(), random.gauss(0, 1), np.random.randn()  # halves of pairs
            drawn[rank].append((float(torch.rand(())), *host))

    def body(time: VirtualTime) -> None:
        for rank in range(3):
            fiber = time.spawn(f"rank {rank}", partial(draw, rank), RandomState())
        time.join(fiber)

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        in_virtual_time(body)
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
    assert len(set(drawn[0])) == 3
    assert drawn[0] == drawn[1] == drawn[2]
