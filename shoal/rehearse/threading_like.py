"""Locks, conditions, events, queues and threads as in `threading`, in virtual time."""

from __future__ import annotations

import fcntl
import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.rehearse.virtual_time import Fiber, FiberThread, VirtualTime

_FILE_LOOK_S = 0.001


class _Entered:
    """`with` acquires and releases."""

    def acquire(self) -> bool:
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class VirtualLock(_Entered):
    """Taken again by the fiber that holds it where `is_reentrant`."""

    def __init__(self, time: VirtualTime, is_reentrant: bool = False):
        self._time = time
        self._is_reentrant = is_reentrant
        self._owner: Any = None
        self._depth = 0
        self._waiting: deque[Fiber] = deque()
        self.before_release: list[Callable[[], None]] = []  # called once, by the one that has it

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._me()
        if self._is_reentrant and self._owner is me:
            self._depth += 1
            return True
        if not self._depth:
            self._owner = me
            self._depth = 1
            return True
        if not blocking:
            return False
        time = self._time
        fiber = time.current
        end_s = math.inf if timeout < 0 else time.now_s + timeout
        if timeout >= 0:
            time.at(end_s, lambda: time.wake(fiber))
        self._waiting.append(fiber)
        try:
            while fiber in self._waiting:  # until it is handed over
                if time.now_s >= end_s:
                    self._waiting.remove(fiber)
                    return False
                time.park("a lock")
        except BaseException:
            self._give_up(fiber)
            raise
        return True

    def release(self) -> None:
        """The one that waits longest has it next."""
        while self._depth == 1 and self.before_release:
            self.before_release.pop()()
        self._depth -= 1
        if self._depth:
            return
        self._owner = None
        if self._waiting:
            self._owner = self._waiting.popleft()
            self._depth = 1
            self._time.wake(self._owner)

    def _give_up(self, fiber: Fiber) -> None:
        if fiber in self._waiting:
            self._waiting.remove(fiber)
        elif self._owner is fiber:
            self.release()

    def locked(self) -> bool:
        return self._depth > 0

    def release_all(self) -> int:
        depth = self._depth
        self._depth = 1
        self.release()
        return depth

    def acquire_again(self, depth: int) -> None:
        self.acquire()
        self._depth = depth

    def _me(self) -> object:
        return self._time.current if self._time.is_fiber else threading.get_ident()


@dataclass(eq=False)
class _Waiter:
    fiber: Fiber
    ready: Callable[[], Any]
    is_woken: bool | None = None  # False: its time is over


class VirtualCondition(_Entered):
    """A fiber that waits for a predicate is woken when it holds: the one that notifies looks."""

    def __init__(self, time: VirtualTime, lock: VirtualLock | None = None):
        self._time = time
        self._lock = lock or VirtualLock(time, is_reentrant=True)
        self._waiting: list[_Waiter] = []

    def acquire(self) -> bool:
        return self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None, ready: Callable[[], Any] = lambda: True) -> bool:
        time = self._time
        me = _Waiter(time.current, ready)
        self._waiting.append(me)
        depth = self._lock.release_all()
        if timeout is not None:
            time.at(time.now_s + max(0.0, timeout), lambda: self._wake(me, False))
        try:
            while me.is_woken is None:
                time.park("a condition")
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
            self._lock.acquire_again(depth)
        return me.is_woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end_s = None if timeout is None else self._time.now_s + timeout
        while not (result := predicate()):
            left_s = None if end_s is None else end_s - self._time.now_s
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s, predicate)
        return result

    def notify_all(self) -> None:
        """Those that it concerns go on once the lock is released."""
        if not self._lock.locked():
            self._look()
        elif self._waiting and self._look not in self._lock.before_release:
            self._lock.before_release.append(self._look)

    def _look(self) -> None:
        for waiter in [waiter for waiter in self._waiting if waiter.ready()]:
            self._wake(waiter, True)

    def _wake(self, waiter: _Waiter, is_notified: bool) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)
            waiter.is_woken = is_notified
            self._time.wake(waiter.fiber)


class VirtualEvent:
    def __init__(self, time: VirtualTime):
        self._condition = VirtualCondition(time)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._condition.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            return bool(self._condition.wait_for(lambda: self._is_set, timeout))


class VirtualQueue:
    """With one reader."""

    def __init__(self, time: VirtualTime):
        self._items: deque[Any] = deque()
        self._condition = VirtualCondition(time)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._condition.notify_all()

    def get(self, *, timeout: float | None = None) -> Any:
        with self._condition:
            if not self._condition.wait_for(lambda: self._items, timeout):
                raise queue.Empty
            return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class VirtualThread(FiberThread):
    """A fiber of the worker or server that starts it; a queue of Shoal, which draws no numbers."""

    time: VirtualTime  # of the rehearsal that runs
    _fiber: Fiber | None = None  # once it is started

    def start(self) -> None:
        self._fiber = self.time.spawn(
            self.name, partial(threading.Thread.run, self), None, self, self.time.current.group
        )

    def join(self, timeout: float | None = None) -> None:
        assert self._fiber is not None
        self.time.join(self._fiber, math.inf if timeout is None else timeout)

    def is_alive(self) -> bool:
        return self._fiber is not None and not self._fiber.is_over


class VirtualClock:
    """What `runtime.clock` has while a rehearsal runs."""

    def __init__(self, time: VirtualTime):
        self._time = time
        self.sleep = time.sleep
        self.check = time.check
        self.Queue = partial(VirtualQueue, time)
        self.Thread = type("Thread", (VirtualThread,), {"time": time})

    def Lock(self) -> VirtualLock:
        return VirtualLock(self._time)

    def Condition(self, lock: VirtualLock | None = None) -> VirtualCondition:
        return VirtualCondition(self._time, lock)

    def Event(self) -> VirtualEvent:
        return VirtualEvent(self._time)

    def lock_file(self, handle: int, flags: int) -> None:
        """Looks again and again: the fiber that has the file may wait meanwhile."""
        while True:
            self.check()  # a process that was killed writes nothing more
            try:
                return fcntl.flock(handle, flags | fcntl.LOCK_NB)
            except BlockingIOError:
                if flags & fcntl.LOCK_NB:
                    raise
            self._time.sleep(_FILE_LOOK_S)

    def monotonic(self) -> float:
        return self._time.now_s

    def monotonic_ns(self) -> int:
        return round(self._time.now_s * 1e9)

    def process_time_ns(self) -> int:
        """All workers are in one process: asking for the time of its many threads takes long."""
        return 0
