"""The hosts of a lab, for `--on lab`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from shoal.errors import BadInput
from shoal.lab.lab import find_lab
from shoal.lab.namespaces import require
from shoal.launch.here.process_config import Replication
from shoal.launch.hosts.machines import HostProcess, Machine, ServerHosts, servers_in_turn
from shoal.runtime.memory_limit import cores


class LabMachines:
    """Workers are spread over all hosts, which share the cores of this machine."""

    is_private = True

    def __init__(self, name: str | None = None):
        """BadInput where there is no such lab, or this user cannot enter it."""
        self._lab = find_lab(name)
        require()
        self._started: list[HostProcess] = []

    def hosts(self, workers: int) -> Sequence[Machine]:
        hosts = self._lab.hosts
        share = max(1, cores() // len(hosts))
        each, more = divmod(workers, len(hosts))
        return [
            Machine(host.name, host.address, each + (number < more), share, f"rack{host.rack}")
            for number, host in enumerate(hosts)
        ]

    def server_hosts(self, servers: int, replication: Replication) -> ServerHosts:
        return servers_in_turn(self.hosts(0), servers, replication)

    def listen(self) -> socket.socket:
        return self._lab.listen()

    def replacement(
        self, machine: Machine, lost: Collection[str], over: threading.Event
    ) -> Machine:
        """The next one that is not lost, in the order of the hosts."""
        hosts = self.hosts(len(self._lab.hosts))
        first = [host.name for host in hosts].index(machine.name)
        for host in (*hosts[first:], *hosts[:first]):
            if host.name not in lost:
                return host
        raise BadInput("all hosts of the lab are lost")

    def find_again(self, machine: Machine, over: threading.Event) -> Machine:
        return machine

    def start(
        self,
        machine: Machine,
        command: Sequence[str],
        environ: Mapping[str, str],
        given: bytes,
        on_line: Callable[[str], None],
    ) -> HostProcess:
        inside = self._lab.host(machine.name).namespace.command(command)
        process = HostProcess(inside, environ, given, on_line)
        self._started.append(process)
        return process

    def __enter__(self) -> LabMachines:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
