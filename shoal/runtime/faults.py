"""Trouble on purpose: workers that are slow, or that are killed at a step.

    --slow 1:4x     worker 1 takes four times as long to compute
    --kill 2@50     worker 2 kills itself when it comes to compute step 50; the first step is 1
    --kill 2@0      ... when it calls job.step, before it has joined the others

The text is checked before anything starts. Workers read it from SHOAL_SLOW and SHOAL_KILL, where
several are joined by commas.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from shoal.errors import BadInput

T = TypeVar("T")
_SLOW = re.compile(r"([0-9]{1,6}):([0-9]{1,4}(?:\.[0-9]{1,4})?)x")
_KILL = re.compile(r"([0-9]{1,6})@([0-9]{1,12})")
_MOST = 1000  # times slower


@dataclass(frozen=True)
class Faults:
    """What one worker does to itself in a step."""

    slow: float = 1.0  # times slower
    kill_at: int | None = None  # or the next one that it computes: a sync may pass over steps

    def at_start(self) -> None:
        """The worker has not joined anybody yet."""
        if self.kill_at == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(
        self, run: Callable[..., T], number: Callable[[], int], clock_s: Callable[[], float]
    ) -> Callable[..., T]:
        """`run`, with the trouble before and after it; `number()` is the number of the step."""

        def troubled(*args: object) -> T:
            if self.kill_at is not None and number() >= self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            began_s = clock_s()
            result = run(*args)
            time.sleep((self.slow - 1) * max(0.0, clock_s() - began_s))
            return result

        return troubled


def busy_s() -> float:
    """How long this thread has computed or waited for a core, but not for other ranks.

    Were that counted, slow workers that wait for each other would make each other ever slower.
    """
    waited_ns = 0
    with suppress(OSError, ValueError, IndexError), open("/proc/thread-self/schedstat") as file:
        waited_ns = int(file.read().split()[1])
    return time.thread_time() + waited_ns / 1e9


def fault_variables(slow: Sequence[str], kill: Sequence[str], workers: int) -> dict[str, str]:
    """The variables for the workers; BadInput if a text or a rank is wrong."""
    read_slow(slow, workers)
    read_kill(kill, workers)
    found = {"SHOAL_SLOW": ",".join(slow), "SHOAL_KILL": ",".join(kill)}
    return {name: text for name, text in found.items() if text}


def faults_of(environ: Mapping[str, str], rank: int, workers: int) -> Faults | None:
    """What the variables have in store for this worker; None is the usual case."""
    slow = read_slow(_listed(environ, "SHOAL_SLOW"), workers)
    kill = read_kill(_listed(environ, "SHOAL_KILL"), workers)
    if rank not in slow and rank not in kill:
        return None
    return Faults(slow.get(rank, 1.0), kill.get(rank))


def read_slow(texts: Sequence[str], workers: int) -> dict[int, float]:
    """Worker -> times slower."""
    found = _read("--slow", _SLOW, "1:4x", texts, workers)
    factors = {rank: float(number) for rank, number in found.items()}
    for rank, factor in factors.items():
        if not 1 <= factor <= _MOST:
            raise BadInput(f"--slow {rank}:{factor:g}x: a worker can be 1 to {_MOST} times slower")
    return factors


def read_kill(texts: Sequence[str], workers: int) -> dict[int, int]:
    """Worker -> the step that it does not live through."""
    found = _read("--kill", _KILL, "2@50", texts, workers)
    return {rank: int(number) for rank, number in found.items()}


def _read(
    option: str, form: re.Pattern[str], example: str, texts: Sequence[str], workers: int
) -> dict[int, str]:
    found: dict[int, str] = {}
    for text in texts:
        match = form.fullmatch(text)
        if match is None:
            raise BadInput(f"{option} takes a text such as {example}, not {text[:40]!r}")
        rank = int(match[1])
        if rank >= workers:
            raise BadInput(
                f"{option} {text}: there is no worker {rank}, the last of {workers} is "
                f"{workers - 1}"
            )
        if rank in found:
            raise BadInput(f"{option} names worker {rank} twice")
        found[rank] = match[2]
    return found


def _listed(environ: Mapping[str, str], name: str) -> list[str]:
    return [text for text in environ.get(name, "").split(",") if text]
