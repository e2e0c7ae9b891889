"""Operations run in the order of the calls, on the thread or on the one that waits."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shoal.comm.work_queue import QueuedWork, WorkQueue


class Light(QueuedWork):
    """Begun in the call, ended by the wait."""

    def __init__(self, queue: WorkQueue, log: list[str], name: str):
        super().__init__(queue)
        self.log = log
        self.name = name

    def begin(self, *arguments: Any) -> bool:
        self.log.append(f"begin {self.name}")
        return True

    def run(self) -> None:
        self.log.append(f"{'end' if self.begun else 'run'} {self.name} {thread_name()}")


def thread_name() -> str:
    return "thread" if threading.current_thread().name == "queue" else "caller"


def test_without_a_background_the_caller_runs_all_before_the_one_it_waits_for() -> None:
    queue = WorkQueue("queue", background=False)
    log: list[int] = []
    works = [queue.call(lambda i=i: log.append(i)) for i in range(4)]  # type: ignore[misc]
    works[2].wait()
    assert log == [0, 1, 2] and not works[3].is_done
    works[3].wait()
    assert log == [0, 1, 2, 3]


def test_a_light_operation_needs_no_thread_and_is_not_begun_behind_another() -> None:
    log: list[str] = []
    alone, behind = WorkQueue("queue"), WorkQueue("queue", background=False)
    behind.call(lambda: log.append("first"))
    for queue, name in ((alone, "a"), (behind, "b")):
        work = Light(queue, log, name)
        queue.submit(work)
        work.wait()
    assert log == ["begin a", "end a caller", "first", "run b caller"]


def test_the_thread_takes_over_what_is_polled() -> None:
    queue = WorkQueue("queue", idle_s=0.0)
    log: list[str] = []
    work = Light(queue, log, "a")
    done = threading.Event()
    queue.submit(work)
    work.when_done(done.set)
    assert done.wait(60) and work.poll()
    assert log == ["begin a", "end a thread"]
    work.when_done(lambda: log.append("at once"))
    assert log[-1] == "at once"
    queue.close()


def test_an_error_is_raised_by_every_wait_and_does_not_stop_the_queue() -> None:
    queue = WorkQueue("queue", background=False)

    def fail() -> None:
        raise ZeroDivisionError("no")

    work = queue.call(fail)
    after = queue.call(lambda: None)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            work.wait()
    after.wait()


def test_what_is_not_begun_when_the_queue_closes_is_abandoned() -> None:
    queue = WorkQueue("queue", background=False)
    log: list[int] = []
    queue.call(lambda: log.append(1))
    queue.close()
    assert not log


def test_a_callback_may_wait_for_operations_that_only_the_thread_carries_out() -> None:
    queue = WorkQueue("queue")
    log: list[str] = []
    ended = threading.Event()

    def again() -> None:
        inner = threading.Event()
        queue.call(lambda: log.append("second")).when_done(inner.set)
        assert inner.wait(60)
        queue.call(lambda: log.append("third")).when_done(ended.set)

    release = threading.Event()
    first = queue.call(lambda: (release.wait(60), log.append("first"))[1])
    first.when_done(again)
    release.set()
    assert ended.wait(60) and log == ["first", "second", "third"]
    queue.close()


def test_one_that_has_taken_the_queue_acts_before_all_later_operations() -> None:
    queue = WorkQueue("taken")
    done: list[str] = []
    assert queue.try_take() and not queue.try_take()
    work = queue.call(lambda: done.append("operation"))
    done.append("taken")
    queue.give_back()
    work.wait()
    assert done == ["taken", "operation"] and queue.try_take()
    queue.close()
