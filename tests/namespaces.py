"""Hosts on one machine: network namespaces that a virtual cable or switch joins. Needs root."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from shoal.launch.lab import namespaces
from shoal.launch.lab.namespaces import CableEnd, Namespace, NetworkError, join, remove

T = TypeVar("T")
_ETH_P_ALL = 3


@dataclass(frozen=True)
class Host:
    """A namespace, the address in it, and its end of the cable."""

    name: str
    address: str
    device: str

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.name)

    @property
    def end(self) -> CableEnd:
        return CableEnd(self.namespace, self.device)

    def set_up(self) -> None:
        """Once there is a cable."""
        self.namespace.set_address(self.device, self.address, 24)
        self.end.up()

    def run(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        """Start a program on this host; its output comes as text."""
        return subprocess.Popen(
            self.namespace.command(command),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def call(self, function: Callable[[], T]) -> T:
        """What `function` returns in a thread whose sockets are those of this host."""
        return self.namespace.call(function)

    def enter(self) -> None:
        """From now on sockets of this thread, and of those that it starts, are of this host."""
        self.namespace.enter()


@cache
def why_not() -> str:
    """Why there cannot be namespaces here; empty if there can."""
    reason = namespaces.why_not()
    if reason:
        return reason
    try:
        with two_hosts():
            return ""
    except (OSError, NetworkError) as error:
        return f"no network namespaces here: {error}"


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    number = os.getpid() % 100_000
    first, second = (
        Host(f"shoal{number}{end}", f"10.77.0.{index}", f"sh{number}{end}")
        for index, end in enumerate("ab", start=1)
    )
    with ExitStack() as stack:
        stack.callback(remove, [first.namespace, second.namespace])
        for host in (first, second):
            host.namespace.add()
        join(first.end, second.end)
        for host in (first, second):
            host.set_up()
        yield first, second


class Lan:
    """Hosts at one switch. What one sends to another can be dropped, in one direction or both.

    A host finds another by the hardware address in its table of neighbours, which has no timeout
    here. Where that is an address that no host has, packets are dropped without an error.
    """

    NOWHERE = "02:00:00:00:ff:ff"

    def __init__(self, hosts: list[Host]):
        self.hosts = hosts
        self._cuts: set[tuple[int, int]] = set()

    def cut(self, sender: int, to: int) -> None:
        """From now on nothing that `sender` sends arrives at `to`."""
        self._cuts.add((sender, to))
        self._point(sender, to, self.NOWHERE)

    def cut_both(self, a: int, b: int) -> None:
        self.cut(a, b)
        self.cut(b, a)

    def isolate(self, alone: int, but: tuple[int, ...] = ()) -> None:
        """From all hosts but these."""
        for other in range(len(self.hosts)):
            if other != alone and other not in but:
                self.cut_both(alone, other)

    def heal(self) -> None:
        for sender, to in sorted(self._cuts):
            self._point(sender, to, _hardware(to))
        self._cuts.clear()

    def _point(self, sender: int, to: int, hardware: str) -> None:
        source, target = self.hosts[sender], self.hosts[to]
        source.namespace.ip(
            *("neighbor", "replace", target.address, "lladdr", hardware),
            *("dev", source.device, "nud", "permanent"),
        )


@contextmanager
def lan(count: int) -> Iterator[Lan]:
    number = os.getpid() % 100_000
    switch = Namespace(f"shoal{number}switch")
    hosts = [
        Host(f"shoal{number}h{i}", f"10.77.1.{i + 1}", f"sh{number}h{i}") for i in range(count)
    ]
    with ExitStack() as stack:
        stack.callback(remove, [switch, *(host.namespace for host in hosts)])
        switch.make_switch()
        for index, host in enumerate(hosts):
            _plug_in(switch, host, index)
        made = Lan(hosts)
        for sender in range(count):
            for to in range(count):
                made._point(sender, to, _hardware(to))
        yield made


def _plug_in(switch: Namespace, host: Host, index: int) -> None:
    port = CableEnd(switch, f"port{index}")
    host.namespace.add()
    join(host.end, port, hardware=_hardware(index))
    port.attach()
    port.up()
    host.set_up()


def _hardware(index: int) -> str:
    return f"02:00:00:00:00:{index + 1:02x}"


class Sniffer:
    """All packets on the cable, from the moment it is made."""

    def __init__(self, host: Host):
        self.packets: list[bytes] = []
        self._sock = host.call(lambda: _packet_socket(host.device))
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._sock.close()

    def _read(self) -> None:
        while not self._ending.is_set():
            with suppress(TimeoutError):
                self.packets.append(self._sock.recv(1 << 17))


def _packet_socket(device: str) -> socket.socket:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
    sock.bind((device, 0))
    sock.settimeout(0.2)
    return sock
