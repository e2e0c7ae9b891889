"""Virtual time, and threads of which exactly one runs at a time.

A fiber is a thread whose turns are decided here. It runs until it waits: for a moment, for another
fiber, or for a message. Then the next one runs; when all wait, time goes on to the next event. So
the order of everything follows from the program alone, and a run repeats to the last bit.

    fiber 0   ==== sleeps 3 ms ............ ====
    fiber 1        ==== waits for fiber 0 ..... ====
    now       0 ms                       3 ms
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from shoal.errors import ShoalError
from shoal.rehearse.random_state import RandomState

_STACK_BYTES = 16 << 20  # of a fiber: address space; what backward does not touch takes no memory


class EventSource(Protocol):
    """Something that happens by itself: messages that arrive."""

    def next_s(self) -> float:
        """When the next event is due; infinite where there is none."""

    def advance(self, to_s: float) -> None:
        """Let time pass, up to the next event at most, and let what is due happen."""


class FiberEnd(BaseException):
    """Ends a fiber from outside: the run is over, or its worker was killed."""


class Fiber:
    """`worker` is whose random numbers it draws; None: it draws none."""

    def __init__(self, name: str, worker: RandomState | None, group: object = None):
        self.name = name
        self.worker = worker
        self.group = group  # what is killed together
        self.turn = threading.Lock()
        self.turn.acquire()
        self.is_over = self.is_ending = False
        self.doing = ""  # what it waits for
        self.waiters: list[Fiber] = []


class VirtualTime:
    """The scheduler of all fibers of a rehearsal."""

    def __init__(self, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        """Each fiber runs in a context of `around`."""
        self.now_s = 0.0
        self._around = around
        self.sources: list[EventSource] = []
        self.error: BaseException | None = None  # of a fiber; `run` raises it
        self._ready: deque[Fiber] = deque()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._here = threading.local()
        self._loaded: RandomState | None = None
        self._first: Fiber | None = None
        self._fibers: dict[Fiber, None] = {}  # those that are not over
        self._groups: defaultdict[object, dict[Fiber, None]] = defaultdict(dict)
        self._over = threading.Event()

    # ------------------------------------------------------------------ from outside

    def run(self, body: Callable[[], Any]) -> Any:
        """Run `body` as the first fiber; returns when it has ended, with what it returns.

        Fibers that are left are ended.
        """
        outcome: list[Any] = []

        def first() -> None:
            try:
                outcome.append(body())
            except BaseException as error:
                self.error = self.error or error
            finally:
                self._end_all()

        fiber = self._first = self.spawn("rehearsal", first, None)
        thread_switch(self._ready.popleft())
        try:
            self._over.wait()
        except BaseException as error:  # Ctrl-C; what runs now ends where it waits next
            self._abandon(error)
            self._over.wait()
        fiber.is_over = True
        if self.error is not None:
            raise self.error
        return outcome[0]

    def _end_all(self) -> None:
        me = self.current
        for fiber in list(self._fibers):
            if fiber is not me:
                self.end(fiber)
        while len(self._fibers) > 1:
            self.sleep(0.0)

    def end(self, fiber: Fiber) -> None:
        """It ends at the place where it waits."""
        if not fiber.is_over and not fiber.is_ending:
            fiber.is_ending = True
            self.wake(fiber)

    def end_group(self, group: object) -> None:
        """A process has exited or is killed: all of its fibers end, this one at its next wait."""
        for fiber in list(self._groups.pop(group, ())):
            self.end(fiber)

    # ------------------------------------------------------------------ fibers

    @property
    def current(self) -> Fiber:
        fiber: Fiber | None = getattr(self._here, "fiber", None)
        if fiber is None:
            raise ShoalError("a thread that the rehearsal does not know waits in Shoal's runtime")
        return fiber

    @property
    def is_fiber(self) -> bool:
        return getattr(self._here, "fiber", None) is not None

    def spawn(
        self,
        name: str,
        body: Callable[[], None],
        worker: RandomState | None,
        thread: FiberThread | None = None,
        group: object = None,
    ) -> Fiber:
        """A fiber that begins when the present one waits. `thread` runs it, where one is given."""
        fiber = Fiber(name, worker, group)
        self._fibers[fiber] = self._groups[group][fiber] = None

        def whole() -> None:
            self._here.fiber = fiber
            fiber.turn.acquire()
            self._load(fiber.worker)
            try:
                if not fiber.is_ending:
                    with self._around():
                        body()
            except BaseException as error:
                if not fiber.is_ending:  # else what follows from its end
                    self.error = self.error or error
            finally:
                self._finish(fiber)

        start_thread(thread, whole, name)
        self._ready.append(fiber)
        return fiber

    def _finish(self, fiber: Fiber) -> None:
        fiber.is_over = True
        del self._fibers[fiber]
        self._groups[fiber.group].pop(fiber, None)
        for waiter in fiber.waiters:
            self.wake(waiter)
        if fiber is self._first:
            self._over.set()
        else:
            thread_switch(self._next())

    def join(self, fiber: Fiber, timeout_s: float = math.inf) -> None:
        me = self.current
        end_s = self.now_s + timeout_s
        if timeout_s < math.inf:
            self.at(end_s, lambda: self.wake(me))
        while not fiber.is_over and self.now_s < end_s:
            fiber.waiters.append(me)
            self.park(f"the end of {fiber.name}")

    # ------------------------------------------------------------------ waiting

    def check(self) -> None:
        """Ends the present fiber here, where its process was killed."""
        if self.current.is_ending:
            raise FiberEnd

    def sleep(self, seconds: float) -> None:
        me = self.current
        over: list[bool] = []

        def end() -> None:
            over.append(True)
            self.wake(me)

        self.at(self.now_s + max(0.0, seconds), end)
        while not over:
            self.park("")

    def at(self, moment_s: float, act: Callable[[], None]) -> None:
        """Call `act` at that moment; it must not wait."""
        heapq.heappush(self._events, (moment_s, next(self._numbers), act))

    def park(self, doing: str) -> None:
        """Wait until another fiber or an event wakes this one."""
        self.check()
        me = self.current
        me.doing = doing
        following = self._next()
        if following is not me:
            thread_switch(following)
            me.turn.acquire()
        self._load(me.worker)
        me.doing = ""
        if me.is_ending:
            raise FiberEnd

    def wake(self, fiber: Fiber) -> None:
        """It goes on when its turn comes, and looks whether what it waits for has happened."""
        self._ready.append(fiber)

    def _next(self) -> Fiber:
        """The fiber whose turn it is; time goes on where all wait."""
        while True:
            while self._ready:
                fiber = self._ready.popleft()
                if not fiber.is_over:
                    return fiber
            self._go_on()

    def _go_on(self) -> None:
        """To the next moment at which something happens."""
        moment_s = self._events[0][0] if self._events else math.inf
        moment_s = min([moment_s, *(source.next_s() for source in self.sources)])
        if moment_s == math.inf:
            self._hang()
            return
        self.now_s = max(self.now_s, moment_s)
        for source in self.sources:
            source.advance(self.now_s)
        while self._events and self._events[0][0] <= self.now_s:
            heapq.heappop(self._events)[2]()

    def _hang(self) -> None:
        """Nothing will ever happen: say who waits for what, and end."""
        waits = [f"{f.name} for {f.doing}" for f in self._fibers if f.doing]
        shown = "; ".join(waits[:8]) or "no fiber is left"
        self._abandon(ShoalError(f"the rehearsal hangs at {self.now_s:.3f} s of its time: {shown}"))

    def _abandon(self, error: BaseException) -> None:
        self.error = self.error or error
        first, *others = self._fibers
        for fiber in [*others, first]:
            self.end(fiber)

    def _load(self, worker: RandomState | None) -> None:
        """The global random generators are those of the worker that runs."""
        if worker is None or worker is self._loaded:
            return
        if self._loaded is not None:
            self._loaded.save()
        worker.load()
        self._loaded = worker


def thread_switch(fiber: Fiber) -> None:
    fiber.turn.release()


class FiberThread(threading.Thread):
    """A thread of the program that runs as a fiber."""

    body: Callable[[], None]

    def run(self) -> None:
        self.body()


def start_thread(thread: FiberThread | None, body: Callable[[], None], name: str) -> None:
    if thread is not None:
        thread.body = body
        threading.Thread.start(thread)
        return
    before = threading.stack_size(_STACK_BYTES)
    try:
        threading.Thread(target=body, name=name, daemon=True).start()
    finally:
        threading.stack_size(before)
