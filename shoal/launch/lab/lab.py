"""A lab: built, described, removed.

    shoal.launch.lab.h0 … h3     a namespace for each host: eth0 at 10.77.0.1 …
    shoal.launch.lab.rack0 …     a switch for each rack: ports h0, h1, and `uplink` to the spine
    shoal.launch.lab.spine       a switch with a port for each rack

Names of namespaces carry the name of the lab. So `remove_lab` finds all of them, also where the
process that built them was killed.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shoal.cluster.toml_file import cluster_text
from shoal.errors import BadInput
from shoal.launch.here.process_config import Replication
from shoal.launch.hosts.machines import (
    HostProcess,
    HostProgram,
    Machine,
    ServerHosts,
    servers_in_turn,
)
from shoal.launch.lab.design import LabDesign, check_name
from shoal.launch.lab.namespaces import (
    BRIDGE,
    CableEnd,
    Namespace,
    NetworkError,
    join,
    namespaces_of,
    remove,
    require,
)
from shoal.runtime.lab_files import DEFAULT_LAB, LabFiles, lab_names
from shoal.runtime.memory_limit import cores
from shoal.runtime.preemption import ending_by_exception

_PREFIX = "shoal."
_BITS = 16
_DEVICE = "eth0"
_LAUNCHER = "10.77.255.254"  # of a launcher that serves a board to the hosts
_BACKLOG = 1024


@dataclass(frozen=True)
class LabHost:
    name: str  # h0
    address: str
    rack: int
    namespace: Namespace
    device: str = _DEVICE


@dataclass(frozen=True)
class Lab:
    design: LabDesign

    @property
    def hosts(self) -> list[LabHost]:
        return [self._host(number) for number in range(self.design.hosts)]

    def _host(self, number: int) -> LabHost:
        rack, index = divmod(number, self.design.hosts_per_rack)
        name = f"h{number}"
        return LabHost(name, f"10.77.{rack}.{index + 1}", rack, self._at(name))

    @property
    def switches(self) -> list[Namespace]:
        """Of the racks, in order."""
        return [self._at(f"rack{i}") for i in range(self.design.racks)]

    @property
    def spine(self) -> Namespace:
        return self._at("spine")

    def _at(self, place: str) -> Namespace:
        return Namespace(f"{_PREFIX}{self.design.name}.{place}")

    def host(self, name: str) -> LabHost:
        for host in self.hosts:
            if host.name == name:
                return host
        last = self.design.hosts - 1
        raise BadInput(f"lab {self.design.name} has no host {name!r}: it has h0 … h{last}")

    def listen(self) -> socket.socket:
        """At the switch that all others are connected to: hosts reach it over their links."""
        switch = self.spine if self.design.racks > 1 else self.switches[0]
        switch.ip("address", "replace", f"{_LAUNCHER}/{_BITS}", "dev", BRIDGE)
        return switch.call(lambda: socket.create_server((_LAUNCHER, 0), backlog=_BACKLOG))

    def build(self) -> None:
        """All or nothing, unless this process is killed."""
        design = self.design
        for switch in self.switches:
            switch.make_switch(design.mtu)
        if design.racks > 1:
            self.spine.make_switch(design.mtu)
            for number, switch in enumerate(self.switches):
                up = CableEnd(switch, "uplink")
                down = CableEnd(self.spine, f"rack{number}")
                self._connect(up, down, design.uplink_bytes_per_s)
                up.attach()
                down.attach()
        for host in self.hosts:
            host.namespace.add()
            end = CableEnd(host.namespace, host.device)
            port = CableEnd(self.switches[host.rack], host.name)
            self._connect(end, port, design.link_bytes_per_s)
            port.attach()
            host.namespace.set_address(host.device, host.address, _BITS)
            host.namespace.set_congestion_control(host.device, host.address, _BITS)
            host.namespace.write_hosts({one.name: one.address for one in self.hosts})

    def _connect(self, one: CableEnd, other: CableEnd, bytes_per_s: float) -> None:
        """Shaped in both directions."""
        join(one, other, self.design.mtu)
        for end in (one, other):
            end.shape(self.design.counted(bytes_per_s))
            end.up()


def build_lab(design: LabDesign) -> Lab:
    """BadInput where it cannot be built; then nothing is left of it."""
    design.check()
    require()
    files = LabFiles(design.name)
    with ending_by_exception(), files.claimed(asdict(design)) as is_ours:
        if not is_ours:
            known = f"there is a lab {design.name!r} already: remove it with shoal lab down"
            why = f"{known} {design.name}, or give --name"
            raise BadInput(why if files.is_complete else _incomplete(design.name))
        lab = Lab(design)
        try:
            remove(namespaces_of(f"{_PREFIX}{design.name}."))  # of a lab whose files are gone
            lab.build()
            files.complete(cluster_text(design.cluster()))
        except NetworkError as error:
            remove_lab(design.name)
            raise BadInput(f"this machine cannot have a lab: {error}") from error
        except BaseException:
            remove_lab(design.name)
            raise
    return lab


def find_lab(name: str | None = None) -> Lab:
    """A complete lab; without a name the one that there is."""
    if name is None:
        names = lab_names()
        if len(names) > 1 and DEFAULT_LAB not in names:
            raise BadInput(f"there are several labs: name one of {', '.join(names)}")
        name = names[0] if len(names) == 1 else DEFAULT_LAB
    check_name(name)
    files = LabFiles(name)
    document = files.read()
    if document is None and not files.exist():
        raise BadInput(f"there is no lab {name!r}: shoal lab up --name {name} builds one")
    design = None if document is None else _design(document)
    if design is None or not files.is_complete or not Lab(design).hosts[-1].namespace.exists():
        raise BadInput(_incomplete(name))
    return Lab(design)


def refuse_built_now(name: str) -> None:
    """BadInput where a process builds the lab, which would go on without what is removed."""
    if builder := LabFiles(name).builder():
        raise BadInput(f"lab {name!r} is being built by {builder}: wait for it, or end it first")


def remove_lab(name: str) -> int:
    """Whatever there is of it; returns how many processes were ended."""
    check_name(name)
    ended = remove(namespaces_of(f"{_PREFIX}{name}."))
    LabFiles(name).remove()
    return ended


def known_labs() -> list[str]:
    """All of which there is something."""
    made = [namespace.name.split(".") for namespace in namespaces_of(_PREFIX)]
    return sorted({*lab_names(), *(words[1] for words in made if len(words) == 3)})


def _design(document: dict[str, Any]) -> LabDesign | None:
    try:
        design = LabDesign(**document)
        design.check()
    except (TypeError, BadInput):
        return None
    return design


def _incomplete(name: str) -> str:
    if builder := LabFiles(name).builder():
        return f"lab {name!r} is being built by {builder}: wait until it is complete"
    return f"lab {name!r} is not complete: remove what is left of it with shoal lab down {name}"


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
        """The same, or the next one that is not lost, in the order of the hosts."""
        if machine.name not in lost:
            return machine
        hosts = self.hosts(len(self._lab.hosts))
        first = [host.name for host in hosts].index(machine.name)
        for host in (*hosts[first:], *hosts[:first]):
            if host.name not in lost:
                return host
        raise BadInput("all hosts of the lab are lost")

    def start(self, machine: Machine, program: HostProgram) -> HostProcess:
        inside = self._lab.host(machine.name).namespace.command(program.command)
        process = HostProcess(replace(program, command=inside))
        self._started.append(process)
        return process

    def __enter__(self) -> LabMachines:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.send_signal(signal.SIGKILL)
