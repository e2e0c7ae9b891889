"""Processes of a run on lent hosts, each under an agent: what workers and servers share."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TypeVar

from shoal.launch.agent_processes import AgentProcesses
from shoal.launch.remote_run import RemoteRun

_Processes = TypeVar("_Processes", bound="RemoteProcesses")


class RemoteProcesses:
    """Use as a block: at its end they, and their agents, are gone."""

    def __init__(self, run: RemoteRun):
        self._run = run
        self._agents = AgentProcesses(run.machines, run.spec.config.environ, run.sink)
        self._over = threading.Event()
        self._restarting: list[threading.Thread] = []

    def __enter__(self: _Processes) -> _Processes:
        self._agents.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._agents.__exit__()
        for thread in self._restarting:
            thread.join()

    def signal(self, number: signal.Signals) -> None:
        """SIGTERM reaches the processes through their agents."""
        self._agents.signal(number)

    def _in_background(self, name: str, start: Callable[[], None]) -> None:
        """An engine may need time for a host in place of one that is lost."""
        thread = threading.Thread(target=start, name=name, daemon=True)
        self._restarting.append(thread)
        thread.start()
