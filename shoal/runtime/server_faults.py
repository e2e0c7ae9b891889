"""Fault injection for servers: killed at a step, or slow.

    --kill server:1@50     server 1 is killed when a worker begins step 50; repeatable
    --slow server:1:4x     server 1 takes four times as long for what it answers

The worker that comes to the step first kills the process whose number is in the run directory.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import BadInput
from shoal.runtime.run_dir import RunDir
from shoal.runtime.wording import counted

PREFIX = "server:"
NO_SERVERS = "this strategy starts no servers"
_SLOW = re.compile(r"server:([0-9]{1,6}):([0-9]{1,4}(?:\.[0-9]{1,4})?)x")
_KILL = re.compile(r"server:([0-9]{1,6})@([0-9]{1,12})")
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


def for_workers(texts: Sequence[str]) -> list[str]:
    """Those that are not about servers."""
    return [text for text in texts if not text.startswith(PREFIX)]


def read_server_kills(
    texts: Sequence[str], servers: int | None = None, why_none: str = NO_SERVERS
) -> tuple[ServerKill, ...]:
    """BadInput for a wrong text, and where the number of servers is known, for a wrong server."""
    numbers = _read("--kill", _KILL, "server:1@50", texts, servers, why_none)
    kills = [ServerKill(server, int(step)) for server, step in numbers]
    for kill in kills:
        if kills.count(kill) > 1:
            raise BadInput(f"--kill names server {kill.server} at step {kill.step} twice")
    return tuple(kills)


def read_server_slow(
    texts: Sequence[str], servers: int | None = None, why_none: str = NO_SERVERS
) -> dict[int, float]:
    """Server to times slower."""
    numbers = _read("--slow", _SLOW, "server:1:4x", texts, servers, why_none)
    factors = {server: float(factor) for server, factor in numbers}
    if len(factors) < len(numbers):
        raise BadInput("--slow names a server twice")
    for server, factor in factors.items():
        if not 1 <= factor <= _MOST:
            raise BadInput(
                f"--slow server:{server}:{factor:g}x: a server can be 1 to {_MOST} times slower"
            )
    return factors


def _read(
    option: str,
    form: re.Pattern[str],
    example: str,
    texts: Sequence[str],
    servers: int | None,
    why_none: str,
) -> list[tuple[int, str]]:
    found = []
    for text in texts:
        if not text.startswith(PREFIX):
            continue
        match = form.fullmatch(text)
        if match is None:
            raise BadInput(f"{option} takes a text such as {example}, not {text[:40]!r}")
        if servers is not None and int(match[1]) >= servers:
            last = f"the last of {counted(servers, 'server')} is {servers - 1}"
            raise BadInput(f"{option} {text}: {last if servers else why_none}")
        found.append((int(match[1]), match[2]))
    return found
