"""What this process waits for, since when, and a watcher that says so when it takes long.

    with waiting("rank 0", "server 1", "PULL"): …      a thread waits for a peer
    add_source(segment.current_wait)                    tells of its own waits when it is asked

    after 10 s, and again every minute:
    shoal: rank 0 has waited for server 1 in PULL for 10 s, since 14:03:07

With a limit (--timeout) the watcher also ends waits that nothing else would end: it calls their
`give_up`.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from shoal.runtime import clock
from shoal.runtime.config import WaitConfig
from shoal.runtime.wording import say

T = TypeVar("T")
_FIRST_LOOK_S = 0.0005
_LONGEST_LOOK_S = 0.02
_STATES = {"T": "is stopped", "t": "is being debugged", "D": "waits for its disk", "Z": "has ended"}


class LongWait(NamedTuple):
    """A rank or server that waits for another one."""

    who: str
    whom: str
    doing: str
    since_ns: int
    is_certain: bool = False  # the other one is stopped, or silent: it is said sooner


Source = Callable[[], LongWait | None]  # a method that knows what its object waits for, if asked


@dataclass(eq=False, slots=True)
class waiting:  # reads as a statement: `with waiting(…)`
    """While the block runs, this thread waits for a peer.

    `give_up(seconds)` is called, from another thread, when that has taken as long as the run
    allows (`patience` times the limit); it has to make the wait end.
    """

    who: str
    _whom: str | Callable[[], str]
    _doing: str
    give_up: Callable[[float], object] | None = None
    patience: float = 1.0
    since_ns: int = 0
    thread: int = 0

    def __enter__(self) -> None:
        self.since_ns = clock.monotonic_ns()
        self.thread = threading.get_ident()
        _noted[id(self)] = self

    def __exit__(self, *_: object) -> None:
        del _noted[id(self)]

    def current_wait(self) -> LongWait:
        whom = self._whom if isinstance(self._whom, str) else self._whom()
        return LongWait(self.who, whom, self._doing, self.since_ns)


_noted: dict[int, waiting] = {}
_sources: list[weakref.WeakMethod[Source]] = []


def is_waiting(thread: int) -> bool:
    """Whether a thread waits now: in a block above, or in a function `wait` of Shoal."""
    if any(noted.thread == thread for noted in list(_noted.values())):
        return True
    frame = sys._current_frames().get(thread)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "wait" and module.startswith("shoal."):
            return True
        frame = frame.f_back
    return False


def add_source(source: Source) -> None:
    """Ask what is waited for, as long as the object of this method exists."""
    _sources[:] = [known for known in _sources if known() is not None]
    _sources.append(weakref.WeakMethod(source))


def process_in_words(pid: int) -> str:
    """`process 77`, and what the kernel says of it where that explains a wait."""
    state = state_of(pid)
    return f"process {pid}{f' {_STATES[state]}' if state in _STATES else ''}"


def state_of(pid: int) -> str:
    """The letter of /proc: R, S, D, T (stopped), Z; empty where there is none."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


@dataclass
class _Said:
    """What the watcher has done about one wait."""

    next_ns: int
    has_given_up: bool = False


class Periodic(AbstractContextManager["Periodic"]):
    """A thread that acts after each period, and when it is poked, while the block runs."""

    def __init__(self, name: str, period_s: float, act: Callable[[], None]):
        self._period_s = period_s
        self._act = act
        self._is_over = False
        self._poked = clock.Event()
        self.poke = self._poked.set
        self._thread = clock.Thread(target=self._run, name=name, daemon=True)
        self.start = self._thread.start

    def __enter__(self) -> Periodic:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, join_s: float | None = None) -> None:
        self._is_over = True
        self.poke()
        if self._thread.is_alive():
            self._thread.join(join_s)

    def _run(self) -> None:
        while True:
            self._poked.wait(self._period_s)
            self._poked.clear()
            if self._is_over:
                return
            with suppress(OSError):  # of a full disk, for example: it acts again
                self._act()


class Watcher(Periodic):
    """Looks at the waits of this process while the block runs."""

    def __init__(self, config: WaitConfig, say: Callable[[str], None] = say):
        self._config = config
        self._say = say
        self._said: dict[tuple[int, str], _Said] = {}
        super().__init__("shoal-waits", config.pause_s, self.look)

    def look(self) -> None:
        """Say what is due now."""
        noted = list(_noted.values())
        sources = [source for known in list(_sources) if (source := known()) is not None]
        seen = set()
        asked = [(wait, None) for source in sources if (wait := source()) is not None]
        for wait, noted_as in [*((n.current_wait(), n) for n in noted), *asked]:
            key = (wait.since_ns, wait.doing)
            seen.add(key)
            notice_s = self._config.notice_s / (2 if wait.is_certain else 1)
            first_ns = wait.since_ns + int(notice_s * 1e9)
            self._tell(wait, self._said.setdefault(key, _Said(first_ns)), noted_as)
        self._said = {key: said for key, said in self._said.items() if key in seen}

    def _tell(self, wait: LongWait, said: _Said, noted: waiting | None) -> None:
        now_ns = clock.monotonic_ns()
        seconds = (now_ns - wait.since_ns) / 1e9
        if now_ns >= said.next_ns:
            said.next_ns = now_ns + int(self._config.repeat_s * 1e9)
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
            waited = f"{wait.who} has waited for {wait.whom} in {wait.doing}"
            self._say(f"{waited} for {seconds:.0f} s, since {since}")
        limit_s = self._config.limit_s
        if noted is None or noted.give_up is None or limit_s is None or said.has_given_up:
            return
        if seconds >= limit_s * noted.patience:
            said.has_given_up = True
            noted.give_up(seconds)


class Backoff:
    """Each call sleeps twice as long as the one before, up to a limit."""

    def __init__(self, first_s: float, longest_s: float):
        self._next_s = first_s
        self._longest_s = longest_s

    def __call__(self) -> None:
        clock.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, self._longest_s)


def until(
    found: Callable[[], T | None],
    wait: AbstractContextManager[None],
    patience_s: float,
    too_late: Callable[[], Exception],
) -> T:
    """What `found` returns, which is called again and again until it is not None."""
    deadline_s = clock.monotonic() + patience_s
    pause = Backoff(_FIRST_LOOK_S, _LONGEST_LOOK_S)
    with wait:
        while (result := found()) is None:
            if clock.monotonic() > deadline_s:
                raise too_late()
            pause()
        return result
