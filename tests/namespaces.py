"""Two hosts on one machine: network namespaces that a virtual cable joins. Needs root."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
_ETH_P_ALL = 3


@dataclass(frozen=True)
class Host:
    """A namespace, the address in it, and its end of the cable."""

    name: str
    address: str
    device: str

    def run(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        """Start a program on this host; its output comes as text."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def call(self, function: Callable[[], T]) -> T:
        """What `function` returns in a thread whose sockets are those of this host."""
        results: list[T] = []
        thread = threading.Thread(target=lambda: results.append(self._inside(function)))
        thread.start()
        thread.join()
        return results[0]

    def _inside(self, function: Callable[[], T]) -> T:
        with open(f"/run/netns/{self.name}") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        return function()


def why_not() -> str:
    """Why there cannot be namespaces here; empty if there can."""
    if not hasattr(socket, "AF_PACKET") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    try:
        with two_hosts():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or error
        return f"no network namespaces here: {str(reason).strip()}"


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    number = os.getpid() % 100_000
    hosts = [
        Host(f"shoal{number}{end}", f"10.77.0.{index}", f"sh{number}{end}")
        for index, end in enumerate("ab", start=1)
    ]
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        first, second = hosts
        _ip("link", "add", first.device, "netns", first.name, "type", "veth",
            "peer", "name", second.device, "netns", second.name)  # fmt: skip
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.name, "link", "set", host.device, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield first, second
    finally:
        for host in hosts:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", host.name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


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
