"""Network namespaces as hosts and switches, cables between them, and the rates of cables.

Everything goes through `ip` and `tc` of iproute2, which need root.

    host   eth0 ──────────── port h0 of a bridge   in the namespace of a switch
           tbf: what it sends      tbf: what it gets
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from shoal.errors import BadInput, ShoalError

T = TypeVar("T")
CONGESTION_CONTROL = "cubic"
BRIDGE = "switch"  # the name of the bridge in a switch's namespace
_FOLDER = Path("/run/netns")
_FILES = Path("/etc/netns")  # `ip netns exec` shows files of a namespace in place of those in /etc
_CLONE_NEWNET = 0x40000000
_TOOL_S = 30.0

# What a token bucket lets through at once: at least the largest packet that TCP hands down.
_BURST_BYTES = 128 * 1024
_BURST_S = 1e-3
# What a port of a switch holds back before it drops.
_QUEUE_BYTES = 1024 * 1024
_QUEUE_S = 20e-3


class NetworkError(ShoalError):
    """`ip` or `tc` has failed; the message has what it said."""


@dataclass(frozen=True)
class Namespace:
    """A network namespace, by its name in /run/netns."""

    name: str

    def add(self) -> None:
        run_tool("ip", "netns", "add", self.name)
        self.ip("link", "set", "lo", "up")

    def exists(self) -> bool:
        return (_FOLDER / self.name).exists()

    def delete(self) -> None:
        """With the ends of its cables, and so the cables; nothing where there is none."""
        if self.exists():
            with suppress(NetworkError):  # another process has deleted it meanwhile
                run_tool("ip", "netns", "delete", self.name)
        shutil.rmtree(_FILES / self.name, ignore_errors=True)
        with suppress(OSError):  # others have files there
            _FILES.rmdir()

    def write_hosts(self, addresses: Mapping[str, str]) -> None:
        """Names of hosts, for programs in it; no other name is looked up, since no server answers.

        `ip` mounts these files for the programs that it starts, in place of those in /etc.
        """
        folder = _FILES / self.name
        folder.mkdir(parents=True, exist_ok=True)
        # sockets that take IPv6, too, see addresses of IPv4 in the second form
        lines = [f"{a} {name}\n::ffff:{a} {name}\n" for name, a in addresses.items()]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        (folder / "resolv.conf").write_text("options timeout:1 attempts:1\n")

    def ip(self, *words: str) -> None:
        run_tool("ip", "-n", self.name, *words)

    def command(self, command: Sequence[str]) -> list[str]:
        """The same program in this namespace: `ip` becomes the program, with its process id."""
        return ["ip", "netns", "exec", self.name, *command]

    def pids(self) -> list[int]:
        """The processes in it."""
        if not self.exists():
            return []
        words = run_tool("ip", "netns", "pids", self.name).split()
        return [int(word) for word in words if word.isdigit()]

    def enter(self) -> None:
        """From now on sockets of this thread, and of those that it starts, are of this one."""
        with (_FOLDER / self.name).open() as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def call(self, function: Callable[[], T]) -> T:
        """What `function` returns in a thread whose sockets are of this namespace."""
        results: list[T] = []

        def inside() -> None:
            self.enter()
            results.append(function())

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        return results[0]

    def make_switch(self, mtu: int | None = None) -> None:
        self.add()
        self.ip("link", "add", BRIDGE, *_mtu(mtu), "type", "bridge")
        self.ip("link", "set", BRIDGE, "up")

    def set_address(self, device: str, address: str, bits: int) -> None:
        self.ip("address", "add", f"{address}/{bits}", "dev", device)

    def set_congestion_control(self, device: str, address: str, bits: int) -> None:
        """Linux's default, whatever this machine has: figures of labs are to be comparable."""
        if CONGESTION_CONTROL not in _congestion_controls():
            return
        network = str(ipaddress.ip_interface(f"{address}/{bits}").network)
        self.ip(
            "route",
            "replace",
            network,
            "proto",
            "kernel",
            "scope",
            "link",
            "dev",
            device,
            "src",
            address,
            "congctl",
            CONGESTION_CONTROL,
        )


class CableEnd(NamedTuple):
    """An interface in a namespace."""

    namespace: Namespace
    device: str

    def attach(self) -> None:
        """To the bridge of the switch that the namespace is."""
        self.namespace.ip("link", "set", self.device, "master", BRIDGE)

    def up(self) -> None:
        self.namespace.ip("link", "set", self.device, "up")

    def shape(self, bytes_per_s: float) -> None:
        """What leaves here, at most, in bytes a second, from the Ethernet header on."""
        bits = round(bytes_per_s * 8)
        burst = round(max(_BURST_BYTES, bytes_per_s * _BURST_S))
        limit = burst + round(max(_QUEUE_BYTES, bytes_per_s * _QUEUE_S))
        run_tool(
            *("tc", "-n", self.namespace.name, "qdisc", "add", "dev", self.device, "root", "tbf"),
            *("rate", f"{bits}bit", "burst", str(burst), "limit", str(limit)),
        )


def join(
    one: CableEnd, other: CableEnd, mtu: int | None = None, hardware: str | None = None
) -> None:
    """A cable; `hardware` is the address of its first end."""
    address = () if hardware is None else ("address", hardware)
    run_tool(
        *("ip", "link", "add", one.device, *_mtu(mtu), "netns", one.namespace.name, *address),
        *("type", "veth", "peer", "name", other.device, *_mtu(mtu)),
        *("netns", other.namespace.name),
    )


def _mtu(mtu: int | None) -> tuple[str, ...]:
    return () if mtu is None else ("mtu", str(mtu))


def _congestion_controls() -> list[str]:
    with suppress(OSError):
        return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    return []


def namespaces_of(prefix: str) -> list[Namespace]:
    """Those whose names begin so, also where only their files are left."""
    found: set[str] = set()
    for folder in (_FOLDER, _FILES):
        with suppress(FileNotFoundError):
            found |= {name for name in os.listdir(folder) if name.startswith(prefix)}
    return [Namespace(name) for name in sorted(found)]


def remove(namespaces: Sequence[Namespace]) -> int:
    """End the processes in them and delete them; returns how many processes there were."""
    ended = 0
    for namespace in namespaces:
        ended += _end_processes(namespace)
        namespace.delete()
    return ended


def _end_processes(namespace: Namespace) -> int:
    pids = [pid for pid in namespace.pids() if pid != os.getpid()]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def why_not() -> str:
    """Why there can be no namespaces with shaped links here, in a sentence; empty if there can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"a lab needs the program {tool}, which is not installed: install iproute2"
    if os.geteuid() != 0:
        return "a lab needs root, for network namespaces: start it with sudo"
    return ""


def require() -> None:
    reason = why_not()
    if reason:
        raise BadInput(reason)


def run_tool(*words: str) -> str:
    """What it prints; NetworkError with what it says, if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=_TOOL_S, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise NetworkError(f"{' '.join(words)}: {said[-1]}")
    return done.stdout
