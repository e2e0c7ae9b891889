"""Operations one after the other in the order of the calls, beside the computation.

A thread carries them out. A caller that waits for an operation which the thread has not begun
carries it out itself, with all operations before it: that saves a handover. A light operation is
begun in the call (it gives what other ranks need and waits for none) and ended by the wait; the
thread is woken for it only when something else is asked for first; where `light_lane` began it, the
queue knows of it only then. A callback may wait for later
operations: while the thread is inside one, another thread takes its place if there is work.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from shoal.runtime import clock


class QueuedWork:
    """One operation of a work queue; `wait` returns when it is done, or raises its error."""

    __slots__ = (
        "arguments",
        "begun",
        "callbacks",
        "end_ns",
        "error",
        "is_done",
        "queue",
        "start_ns",
    )
    arguments: tuple[Any, ...]
    begun: bool
    start_ns: int
    end_ns: int

    def __init__(self, queue: WorkQueue):
        self.queue = queue
        self.is_done = False
        self.error: BaseException | None = None
        self.callbacks: list[Callable[[], None]] | None = None
        self.arguments = ()

    def begin(self, *arguments: Any) -> bool:
        """Give what other ranks need without waiting; False where that is not possible."""
        return False

    def run(self) -> None:
        """Carry out the operation, or what `begin` has left of it."""
        raise NotImplementedError

    def wait(self) -> None:
        if not self.is_done:
            self.queue.carry_out(self)
        if self.error is not None:
            raise self.error

    def poll(self) -> bool:
        """Whether it is done; if not, the thread goes on with it."""
        if not self.is_done:
            self.queue.urge()
        return self.is_done

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call it once the operation has ended, well or badly; on the thread that ended it."""
        if self.queue.add_callback(self, callback):
            self.queue.urge()
        else:
            callback()

    @property
    def times(self) -> tuple[int, int] | None:
        """Start and end in ns of the monotonic clock, where the queue is timed."""
        try:
            return self.start_ns, self.end_ns
        except AttributeError:
            return None


class QueuedCall(QueuedWork):
    """A function as an operation of a work queue."""

    __slots__ = ("_function",)

    def __init__(self, queue: WorkQueue, function: Callable[[], None]):
        super().__init__(queue)
        self._function: Callable[[], None] | None = function

    def run(self) -> None:
        function = self._function
        self._function = None  # with all that it holds
        assert function is not None
        function()


class WorkQueue:
    """Safe to use from several threads; one of them works at a time.

    `background` starts operations at the call; without it they start when they are waited for.
    The thread ends after `idle_s` seconds without work (default: when the queue is closed).
    `timed` notes the start and the end of every operation.
    """

    def __init__(self, name: str, background: bool = True, idle_s: float | None = None):
        self._name = name
        self._background = background
        self._idle_s = idle_s
        self.timed = False
        self._lock = clock.Lock()
        self._acquire = self._lock.acquire
        self._release = self._lock.release  # faster than `with`
        self._changed = clock.Condition(self._lock)
        self._sleepers = 0  # a notification costs more than a light operation: only if needed
        self._callers = 0  # those of them that wait for an operation
        self._waiting: deque[QueuedWork] = deque()
        self.take_light: Callable[[], QueuedWork | None] | None = None
        self._working = False
        self._urged = False
        self._closing = False
        self._thread: threading.Thread | None = None  # the one that takes work
        self._threads: list[threading.Thread] = []  # and those inside callbacks

    def submit(self, work: QueuedWork) -> None:
        self._acquire()
        try:
            self._take_light()
            idle = not self._waiting and not self._working
            self._waiting.append(work)
            if self.timed:
                work.start_ns = clock.monotonic_ns()
            work.begun = idle and work.begin(*work.arguments)
            if not work.begun and self._background:
                self._wake()
        finally:
            self._release()

    def call(self, function: Callable[[], None]) -> QueuedWork:
        work = QueuedCall(self, function)
        self.submit(work)
        return work

    def urge(self) -> None:
        """A caller looks without waiting: the thread takes over what is left."""
        with self._lock:
            self._take_light()
            if self._waiting:
                self._wake()

    def add_callback(self, work: QueuedWork, callback: Callable[[], None]) -> bool:
        with self._lock:
            self._take_light()
            if not work.is_done:
                work.callbacks = [*(work.callbacks or []), callback]
            return not work.is_done

    def carry_out(self, work: QueuedWork) -> None:
        """Return when `work` is done, and with it all operations before it."""
        while not work.is_done:
            self._acquire()
            try:
                self._take_light()
                while self._working and not work.is_done:
                    self._callers += 1
                    self._sleep()
                    self._callers -= 1
                if work.is_done or not self._waiting:
                    return
                self._working = True
                next_ = self._waiting.popleft()
            finally:
                self._release()
            self._execute(next_)

    def try_take(self) -> bool:
        """Whether the caller may act in place of the next operation, until `give_back`."""
        with self._lock:
            self._take_light()
            is_free = not self._waiting and not self._working and not self._closing
            self._working |= is_free
        return is_free

    def give_back(self) -> None:
        with self._lock:
            self._end_work()

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread. Operations that have not been begun are abandoned.

        An operation that nothing can interrupt is waited for no longer than `timeout_s`.
        """
        with self._lock:
            self._closing = True
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def light_lane(self, make: Callable[..., Any], *options: Any) -> Any:
        """What begins and ends light operations by itself while nothing else is under way.

        `make` gets this queue, what waits in it and whether a thread is changing it, and `options`.
        """
        lane = make(self, self._waiting, self._lock.locked, *options)
        self.take_light = lane.take
        return lane

    def _take_light(self) -> None:
        """With the lock: an operation that a lane has begun goes before what is asked for now."""
        if self.take_light is not None and (work := self.take_light()) is not None:
            self._waiting.append(work)

    def _execute(self, work: QueuedWork) -> None:
        if self.timed and not work.begun:
            work.start_ns = clock.monotonic_ns()
        try:
            work.run()
        except BaseException as error:
            work.error = error
        if self.timed:
            work.end_ns = clock.monotonic_ns()
        self._acquire()
        work.is_done = True
        self._end_work()
        self._release()
        if work.callbacks is not None:
            self._call_back(work)

    def _end_work(self) -> None:
        """With the lock. The thread sleeps on where there is nothing for it to do."""
        self._working = False
        self._urged &= bool(self._waiting)
        is_awaited = self._callers or self._urged or self._idle_s is not None
        if self._sleepers and is_awaited:
            self._changed.notify_all()

    def _call_back(self, work: QueuedWork) -> None:
        """The thread leaves its place for as long as callbacks run."""
        this = threading.current_thread()
        with self._lock:
            serves = self._thread is this
            if serves:
                self._thread = None
                if self._urged and self._waiting:
                    self._wake()
        for callback in work.callbacks or ():
            callback()
        work.callbacks = None
        with self._lock:
            if serves and self._thread is None:
                self._thread = this

    def _sleep(self, timeout_s: float | None = None) -> bool:
        self._sleepers += 1
        woken = self._changed.wait(timeout_s)
        self._sleepers -= 1
        return woken

    def _wake(self) -> None:
        self._urged = True
        if self._thread is None and not self._closing:
            self._thread = clock.Thread(target=self._serve, daemon=True, name=self._name)
            self._threads.append(self._thread)
            self._thread.start()
        self._changed.notify_all()

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            self._execute(work)
        with self._lock:
            self._threads.remove(threading.current_thread())

    def _next(self) -> QueuedWork | None:
        """The next operation for the thread; None where the thread is to end."""
        this = threading.current_thread()
        with self._lock:
            while not (self._closing or (self._urged and self._waiting and not self._working)):
                if self._thread is not this:
                    return None
                idle_s = None if self._waiting or self._working else self._idle_s
                if not self._sleep(idle_s) and not self._waiting:
                    self._thread = None
                    return None
            if self._closing or self._thread is not this:
                return None
            self._working = True
            return self._waiting.popleft()
