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
from typing import Literal, NamedTuple, TypeVar

from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import RunDir
from shoal.runtime.wording import counted

T = TypeVar("T")
Option = Literal["--slow", "--kill"]
Role = Literal["worker", "server"]
NO_SERVERS = "this strategy starts no servers"
_FORMS: dict[Option, re.Pattern[str]] = {
    "--slow": re.compile(r"(?:server:)?([0-9]{1,6}):([0-9]{1,4}(?:\.[0-9]{1,4})?)x"),
    "--kill": re.compile(r"(?:server:)?([0-9]{1,6})@([0-9]{1,12})"),
}
_EXAMPLES: dict[Option, str] = {"--slow": "1:4x", "--kill": "2@50"}
_MOST = 1000  # times slower


class ServerKill(NamedTuple):
    server: int
    step: int


@dataclass(frozen=True)
class ServerKills:
    """What a worker does to the servers of its run."""

    run_dir: RunDir
    kills: tuple[ServerKill, ...]

    def at(self, step: int) -> None:
        """Carry out those that are due and that no other worker has carried out."""
        for kill in self.kills:
            if step >= kill.step and self.run_dir.claim_kill(kill.server, kill.step):
                pid = self.run_dir.read_server_pid(kill.server)
                with suppress(ProcessLookupError):
                    if pid is not None:
                        os.kill(pid, signal.SIGKILL)


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
    if config.incarnation:
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
    return _factors("worker", texts, workers)


def read_server_slow(
    texts: Sequence[str], servers: int | None = None, why_none: str = NO_SERVERS
) -> dict[int, float]:
    """Server to times slower; where the number of servers is known, others are refused."""
    return _factors("server", texts, servers, why_none)


def read_kill(texts: Sequence[str], workers: int) -> dict[int, int]:
    """Worker to the step at which it is killed."""
    return {rank: int(step) for rank, step in _read("--kill", "worker", texts, workers)}


def read_server_kills(
    texts: Sequence[str], servers: int | None = None, why_none: str = NO_SERVERS
) -> tuple[ServerKill, ...]:
    """Where the number of servers is known, others are refused."""
    found = _read("--kill", "server", texts, servers, why_none)
    kills = [ServerKill(server, int(step)) for server, step in found]
    for kill in kills:
        if kills.count(kill) > 1:
            raise BadInput(f"--kill names server {kill.server} at step {kill.step} twice")
    return tuple(kills)


def _factors(
    role: Role, texts: Sequence[str], count: int | None, why_none: str = ""
) -> dict[int, float]:
    factors = {
        number: float(text) for number, text in _read("--slow", role, texts, count, why_none)
    }
    for number, factor in factors.items():
        if not 1 <= factor <= _MOST:
            raise BadInput(
                f"--slow: {role} {number} can be 1 to {_MOST} times slower, not {factor:g}"
            )
    return factors


def _read(
    option: Option, role: Role, texts: Sequence[str], count: int | None, why_none: str = ""
) -> list[tuple[int, str]]:
    """Numbers of workers or servers, each with the text after it."""
    found: list[tuple[int, str]] = []
    for text in texts:
        if text.startswith("server:") != (role == "server"):
            continue
        match = _FORMS[option].fullmatch(text)
        if match is None:
            example = _EXAMPLES[option]
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
