"""Fault injection: workers that are slow, or that are killed at a step.

    --slow 1:4x     worker 1 takes four times as long to compute
    --kill 2@50     worker 2 kills itself before it computes step 50; the first step is 1
    --kill 2@0      ... when it calls job.step, before it has joined the others

Those of servers (--kill server:1@50) are in `server_faults.py`.

The texts are checked before anything starts, and passed to workers in `RunConfig`.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from shoal.runtime.server_faults import (
    NO_SERVERS,
    ServerKills,
    for_workers,
    read_server_kills,
    read_server_slow,
)

T = TypeVar("T")
_SLOW = re.compile(r"([0-9]{1,6}):([0-9]{1,4}(?:\.[0-9]{1,4})?)x")
_KILL = re.compile(r"([0-9]{1,6})@([0-9]{1,12})")
_MOST = 1000  # times slower


@dataclass(frozen=True)
class Faults:
    """The faults of one worker."""

    slow: float = 1.0  # times slower
    kill_at: int | None = None  # or the next step that it computes: a sync may skip steps
    servers: ServerKills | None = None

    def at_start(self) -> None:
        """Called before the worker joins the others."""
        if self.servers is not None:
            self.servers.at(0)
        if self.kill_at == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(
        self,
        run: Callable[..., T],
        number: Callable[[], int],
        clock_s: Callable[[], float],
        sleep: Callable[[float], None] | None = None,
    ) -> Callable[..., T]:
        """`run` with these faults; `number()` is the number of the step."""

        def faulty(*args: object) -> T:
            if self.servers is not None:
                self.servers.at(number())
            if self.kill_at is not None and number() >= self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            began_s = clock_s()
            result = run(*args)
            (sleep or time.sleep)((self.slow - 1) * max(0.0, clock_s() - began_s))
            return result

        return faulty


def busy_s() -> float:
    """How long this thread has computed or waited for a core.

    Waiting for other ranks does not count: slow workers that wait for each other would become
    slower with every step.
    """
    waited_ns = 0
    with suppress(OSError, ValueError, IndexError), open("/proc/thread-self/schedstat") as file:
        waited_ns = int(file.read().split()[1])
    return time.thread_time() + waited_ns / 1e9


def faults_of(config: RunConfig, rank: int, workers: int) -> Faults | None:
    """The faults of this worker; None, which is usual, without any."""
    slow_factors = read_slow(config.slow, workers)
    kill_steps = read_kill(config.kill, workers)
    if config.generation:
        kill_steps = {}  # once: a worker that was started again lives on
    servers = None
    if config.run_dir is not None and read_server_kills(config.kill):
        servers = ServerKills(config.run_dir, read_server_kills(config.kill))
    if rank not in slow_factors and rank not in kill_steps and servers is None:
        return None
    return Faults(slow_factors.get(rank, 1.0), kill_steps.get(rank), servers)


def check_faults(
    config: RunConfig, workers: int, servers: int = 0, why_no_servers: str = NO_SERVERS
) -> None:
    """BadInput if a text or a rank is wrong."""
    read_slow(config.slow, workers)
    read_kill(config.kill, workers)
    read_server_slow(config.slow, servers, why_no_servers)
    read_server_kills(config.kill, servers, why_no_servers)


def read_slow(texts: Sequence[str], workers: int) -> dict[int, float]:
    """Worker to times slower."""
    numbers = _read("--slow", _SLOW, "1:4x", "server:1:4x", texts, workers)
    factors = {rank: float(number) for rank, number in numbers.items()}
    for rank, factor in factors.items():
        if not 1 <= factor <= _MOST:
            raise BadInput(f"--slow {rank}:{factor:g}x: a worker can be 1 to {_MOST} times slower")
    return factors


def read_kill(texts: Sequence[str], workers: int) -> dict[int, int]:
    """Worker to the step at which it is killed."""
    numbers = _read("--kill", _KILL, "2@50", "server:1@50", texts, workers)
    return {rank: int(number) for rank, number in numbers.items()}


def _read(
    option: str,
    form: re.Pattern[str],
    example: str,
    of_server: str,
    texts: Sequence[str],
    workers: int,
) -> dict[int, str]:
    numbers: dict[int, str] = {}
    for text in for_workers(texts):
        match = form.fullmatch(text)
        if match is None:
            either = f"{example}, or {of_server} for a server"
            raise BadInput(f"{option} takes a text such as {either}, not {text[:40]!r}")
        rank = int(match[1])
        if rank >= workers:
            raise BadInput(
                f"{option} {text}: there is no worker {rank}, the last of {workers} is "
                f"{workers - 1}"
            )
        if rank in numbers:
            raise BadInput(f"{option} names worker {rank} twice")
        numbers[rank] = match[2]
    return numbers
