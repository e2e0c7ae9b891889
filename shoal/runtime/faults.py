"""Fault injection: workers and servers that are slow, or that are killed at a step.

    --slow 1:4x            worker 1 takes four times as long to compute
    --slow server:1:4x     server 1 takes four times as long for what it answers
    --kill 2@50            worker 2 kills itself before it computes step 50; the first step is 1
    --kill 2@0             ... when it calls job.step, before it has joined the others
    --kill server:1@50     server 1 is killed when a worker begins step 50; repeatable

The texts are checked before anything starts, and passed to workers in `RunConfig`. The worker that
comes to the step first kills the server whose process the run directory names.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import RunDir
from shoal.runtime.wording import counted

T = TypeVar("T")
Kills = tuple[tuple[int, int], ...]  # number and step
Option = Literal["--slow", "--kill"]
Role = Literal["worker", "server"]
NO_SERVERS = "this strategy starts no servers"
_FORMS: dict[Option, tuple[str, str]] = {  # each with an example
    "--slow": (r"(?:server:)?([0-9]{1,6}):([0-9]{1,4}(?:\.[0-9]{1,4})?)x", "1:4x"),
    "--kill": (r"(?:server:)?([0-9]{1,6})@([0-9]{1,12})", "2@50"),
}
_MOST = 1000  # times slower


def _end_server(run_dir: RunDir, server: int) -> None:
    pid = run_dir.read_server_pid(server)
    with suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Faults:
    """The faults of one worker, and what it does to the servers of its run."""

    slow: float = 1.0  # times slower
    kill_at: int | None = None  # or the next step that it computes: a sync may skip steps
    run_dir: RunDir | None = None
    server_kills: Kills = ()
    end_worker: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL)
    end_server: Callable[[RunDir, int], None] = _end_server

    def kill(self, step: int) -> None:
        """Carry out what is due, and what no other worker has; 0: before it joins the others."""
        for server, at in self.server_kills:
            if self.run_dir is not None and step >= at and self.run_dir.claim_kill(server, at):
                self.end_server(self.run_dir, server)
        if self.kill_at is not None and step >= self.kill_at:
            self.end_worker()

    def around(
        self,
        run: Callable[..., T],
        number: Callable[[], int],
        clock_s: Callable[[], float],
        sleep: Callable[[float], None] | None = None,
    ) -> Callable[..., T]:
        """`run` with these faults; `number()` is the number of the step."""

        def faulty(*args: object) -> T:
            self.kill(number())
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
    kills = {} if config.incarnation else dict(read_kills(config.kill, workers))  # it lives on
    on_servers = read_kills(config.kill, None, "server") if config.run_dir is not None else ()
    slow = read_slow(config.slow, workers).get(rank, 1.0)
    faults = Faults(slow, kills.get(rank), config.run_dir if on_servers else None, on_servers)
    return None if faults == Faults() else faults


def check_faults(
    config: RunConfig, workers: int, servers: int = 0, why_no_servers: str = NO_SERVERS
) -> None:
    """BadInput if a text or a rank is wrong."""
    read_slow(config.slow, workers)
    read_kills(config.kill, workers)
    read_slow(config.slow, servers, "server", why_no_servers)
    read_kills(config.kill, servers, "server", why_no_servers)


def read_slow(
    texts: Sequence[str], count: int | None, role: Role = "worker", why_none: str = ""
) -> dict[int, float]:
    """By worker or server, of so many, times slower."""
    found = _read("--slow", role, texts, count, why_none)
    factors = {number: float(text) for number, text in found}
    for number, factor in factors.items():
        if not 1 <= factor <= _MOST:
            raise BadInput(
                f"--slow: {role} {number} can be 1 to {_MOST} times slower, not {factor:g}"
            )
    return factors


def read_kills(
    texts: Sequence[str], count: int | None, role: Role = "worker", why_none: str = ""
) -> Kills:
    """Workers or servers, of so many, and the steps at which they are killed."""
    found = _read("--kill", role, texts, count, why_none)
    kills = [(number, int(step)) for number, step in found]
    for kill in kills:
        if kills.count(kill) > 1:
            raise BadInput(f"--kill names {role} {kill[0]} at step {kill[1]} twice")
    return tuple(kills)


def _read(
    option: Option, role: Role, texts: Sequence[str], count: int | None, why_none: str = ""
) -> list[tuple[int, str]]:
    """Numbers of workers or servers, each with the text after it."""
    found: list[tuple[int, str]] = []
    for text in texts:
        if text.startswith("server:") != (role == "server"):
            continue
        form, example = _FORMS[option]
        match = re.fullmatch(form, text)
        if match is None:
            either = f"{example}, or server:{example} for a server"
            raise BadInput(f"{option} takes a text such as {either}, not {text[:40]!r}")
        number = int(match[1])
        if count is not None and number >= count:
            last = f"there is no {role} {number}, the last of {counted(count, role)} is {count - 1}"
            raise BadInput(f"{option} {text}: {last if count else why_none}")
        is_repeatable = option == "--kill" and role == "server"
        if not is_repeatable and number in dict(found):
            raise BadInput(f"{option} names {role} {number} twice")
        found.append((number, match[2]))
    return found
