"""Operations one after the other in the order of the calls, beside the computation.

A thread carries them out. Whoever waits for an operation that the thread has not begun carries it
out himself, with all that came before: that saves handing it over. A light operation is begun in
the call (it gives what others need and waits for nobody) and ended by the wait; the thread is
woken for it only when something else is asked for first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from shoal.observe.trace import OFF, Tracer


class LaneWork:
    """One operation on a lane; `wait` returns when it is done, or raises what went wrong."""

    __slots__ = ("_callbacks", "error", "is_done", "lane")

    def __init__(self, lane: Lane):
        self.lane = lane
        self.is_done = False
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] | None = None

    def begin(self) -> bool:
        """Give without waiting, where that is possible."""
        return False

    def run(self) -> None:
        """Do it, or what `begin` has left of it."""
        raise NotImplementedError

    def wait(self) -> None:
        if not self.is_done:
            lane = self.lane
            if lane.tracer.enabled:
                with lane.tracer.span("wait"):
                    lane.carry_out(self)
            else:
                lane.carry_out(self)
        if self.error is not None:
            raise self.error

    def poll(self) -> bool:
        if not self.is_done:
            self.lane.urge()
        return self.is_done

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call it once the operation has ended, well or badly; on whatever thread that happens."""
        if self.lane.add_callback(self, callback):
            self.lane.urge()
        else:
            callback()

    def add(self, callback: Callable[[], None]) -> None:
        self._callbacks = [*(self._callbacks or []), callback]

    def call_back(self) -> None:
        if self._callbacks is not None:
            for callback in self._callbacks:
                callback()
            self._callbacks = None


class Lane:
    """Safe to use from several threads; one of them works at a time."""

    def __init__(self, name: str):
        self._name = name
        self.tracer: Tracer = OFF
        self._lock = threading.Lock()
        self._acquire = self._lock.acquire
        self._release = self._lock.release  # faster than `with`
        self._changed = threading.Condition(self._lock)
        self._sleepers = 0  # a notification costs more than a light operation: only if needed
        self._waiting: deque[LaneWork] = deque()
        self._working = self._urged = self._closing = False
        self._thread: threading.Thread | None = None

    def submit(self, work: LaneWork) -> None:
        self._acquire()
        try:
            idle = not self._waiting and not self._working
            self._waiting.append(work)
            if not (idle and work.begin()):
                self._wake()
        finally:
            self._release()

    def urge(self) -> None:
        """Somebody looks without waiting: what is left goes to the thread."""
        with self._lock:
            if self._waiting:
                self._wake()

    def add_callback(self, work: LaneWork, callback: Callable[[], None]) -> bool:
        with self._lock:
            if not work.is_done:
                work.add(callback)
            return not work.is_done

    def carry_out(self, work: LaneWork) -> None:
        """Return when `work` is done, and with it all that came before."""
        while not work.is_done:
            self._acquire()
            try:
                while self._working and not work.is_done:
                    self._sleep()
                if work.is_done or not self._waiting:
                    return
                self._working = True
                next_ = self._waiting.popleft()
            finally:
                self._release()
            self._execute(next_)

    def close(self, patience_s: float | None = None) -> None:
        """End the thread. What has not been begun is left undone.

        An operation that nothing can interrupt is waited for no longer than `patience_s`.
        """
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(patience_s)

    def _execute(self, work: LaneWork) -> None:
        try:
            work.run()
        except BaseException as error:
            work.error = error
        self._acquire()
        work.is_done = True
        self._working = False
        if self._urged and not self._waiting:
            self._urged = False
        if self._sleepers:
            self._changed.notify_all()
        self._release()
        if work._callbacks is not None:
            work.call_back()

    def _sleep(self) -> None:
        self._sleepers += 1
        self._changed.wait()
        self._sleepers -= 1

    def _wake(self) -> None:
        self._urged = True
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(target=self._serve, daemon=True, name=self._name)
            self._thread.start()
        self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._lock:
                while not (self._closing or (self._urged and self._waiting and not self._working)):
                    self._sleep()
                if self._closing:
                    return
                self._working = True
                work = self._waiting.popleft()
            self._execute(work)


class OnLane:
    """A group whose collectives go on a lane, which knows where to trace them."""

    _lane: Lane

    @property
    def tracer(self) -> Tracer:
        return self._lane.tracer

    @tracer.setter
    def tracer(self, tracer: Tracer) -> None:
        self._lane.tracer = tracer
