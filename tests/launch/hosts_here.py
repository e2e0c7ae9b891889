"""Hosts of an engine that are this one: a seam to test without another computer."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Collection, Sequence
from typing import Any

from shoal.launch.here.process_config import Replication
from shoal.launch.hosts.machines import (
    HostProcess,
    HostProgram,
    Machine,
    ServerHosts,
    servers_in_turn,
)


class HostsHere:
    """Each has an address of its own at loopback."""

    is_private = True

    def __init__(self, slots: Sequence[int]):
        self.machines = [
            Machine(f"h{index}", f"127.0.0.{index + 1}", count) for index, count in enumerate(slots)
        ]
        self.started: list[Any] = []

    def hosts(self, workers: int) -> Sequence[Machine]:
        return self.machines

    def server_hosts(self, servers: int, replication: Replication) -> ServerHosts:
        return servers_in_turn(self.machines, servers, replication)

    def listen(self) -> socket.socket:
        return socket.create_server(("127.0.0.1", 0), backlog=64)

    def replacement(
        self, machine: Machine, lost: Collection[str], over: threading.Event
    ) -> Machine:
        return next(other for other in (machine, *self.machines) if other.name not in lost)

    def start(self, machine: Machine, program: HostProgram) -> HostProcess:
        self.started.append(HostProcess(program))
        process: HostProcess = self.started[-1]
        return process

    def __enter__(self) -> HostsHere:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            process.send_signal(signal.SIGKILL)
            process.wait()
