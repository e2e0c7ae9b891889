"""A run in a lab, what is recorded of it, and a stranger on a host that has no rank of it.

The stranger does not have the key of the run, and tries everything at all that listens.
"""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from shoal.comm.store.session import BadFrame, StoreLink, StoreRequest
from shoal.comm.transport.tcp.connect import StreamName, prove
from shoal.errors import ShoalError
from shoal.launch.lab.lab import Lab
from shoal.launch.lab.namespaces import Namespace
from shoal.runtime.secret import new_secret
from shoal.server.protocol import Channel, FrameKind, Header, pack
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.handshake import authenticate
from tests.namespaces import Host, Sniffer

ROOT = Path(__file__).parents[3]
SHOAL = (sys.executable, "-m", "shoal")
Address = tuple[str, int]
_PAUSE_S = 0.02
_RUN_S = 280.0
_CONNECT_S = 0.5
_ANSWER_S = 0.2
_HELD = 400  # connections that say nothing, at a time
_MOST_RECORDED = 4096
_MOST_RECEIVED = 100_000  # messages
_SYN, _SYN_ACK = 2, 18
_REFUSED = (OSError, ShoalError, BadFrame)
_CHANNELS: tuple[Channel, ...] = ("control", "push", "pull", "rows", "follow", "coordinator")


class AttackedLab:
    """The last host is that of the stranger."""

    def __init__(self, lab: Lab, folder: Path):
        self.lab = lab
        self.folder = folder
        self.secret = new_secret()
        self.recordings: list[bytes] = []
        key_file = folder / "secret"
        key_file.touch(mode=0o600)
        key_file.write_text(self.secret.hex() + "\n")
        # Runs of other tests have other folders for temporary files
        given = {"SHOAL_SECRET_FILE": str(key_file), "TMPDIR": str(folder)}
        self._environ = {**os.environ, **given, "PYTHONPATH": str(ROOT)}

    def run(self, *words: str, on_line: Callable[[str], None] = lambda line: None) -> str:
        """`shoal run` on the lab, in the folder; its output, with its exit status at the end."""
        with subprocess.Popen(
            [*SHOAL, "run", "--on", f"lab://{self.lab.design.name}", *words],
            cwd=self.folder,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            limit = threading.Timer(_RUN_S, process.send_signal, [signal.SIGKILL])
            limit.start()
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                on_line(line)
            limit.cancel()
        return "".join(lines) + f"exit status {process.returncode}\n"

    def join(self) -> None:
        """`shoal join` for the run of this lab."""
        subprocess.run([*SHOAL, "join"], env=self._environ, check=True, stdout=subprocess.DEVNULL)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """What ranks and servers send to what listens, in the block, is kept for replay."""
        host = self.lab.hosts[0]
        sniffer = Sniffer(Host(host.namespace.name, host.address, host.device))
        try:
            yield
        finally:
            sniffer.close()
        self.recordings += sent_by_those_who_connect(sniffer.packets)

    @contextmanager
    def stranger(self) -> Iterator[Stranger]:
        """In the block, in threads whose sockets are those of the last host."""
        victims = [host.namespace for host in self.lab.hosts[:-1]] + self.lab.switches
        outside = self.lab.hosts[-1].namespace

        def targets() -> list[Address]:
            return [pair for victim in victims for pair in listening(victim)]

        stranger = Stranger((b"", new_secret()), self.recordings, targets)
        acts = (stranger.attack, stranger.flood)
        threads = [threading.Thread(target=outside.call, args=(act,)) for act in acts]
        for thread in threads:
            thread.start()
        try:
            yield stranger
        finally:
            stranger.over.set()
            for thread in threads:
                thread.join()
            for sock in stranger.held:
                sock.close()


def listening(namespace: Namespace) -> list[Address]:
    """What other hosts reach in it."""
    text = ""
    with suppress(OSError):
        text = namespace.call(lambda: Path("/proc/thread-self/net/tcp").read_text())
    found = []
    for words in (line.split() for line in text.splitlines()[1:]):
        host, _, port = words[1].partition(":")
        name = socket.inet_ntoa(struct.pack("<I", int(host, 16)))
        if words[3] == "0A" and not name.startswith("127."):
            found.append((name, int(port, 16)))
    return found


def sent_by_those_who_connect(packets: list[bytes]) -> list[bytes]:
    """The first bytes of each connection, in that direction."""
    flows: dict[bytes, bytes] = {}
    for packet in packets:
        if packet[12:14] != b"\x08\x00" or packet[23] != socket.IPPROTO_TCP:
            continue
        tcp = 14 + 4 * (packet[14] & 15)
        flow = packet[26:34] + packet[tcp : tcp + 4]  # addresses and ports
        if packet[tcp + 13] & _SYN_ACK == _SYN:
            flows[flow] = b""
        begin, end = tcp + 4 * (packet[tcp + 12] >> 4), 14 + int.from_bytes(packet[16:18], "big")
        if flow in flows and len(flows[flow]) < _MOST_RECORDED:
            flows[flow] += packet[begin:end]
    return [data for data in flows.values() if data]


@dataclass
class Stranger:
    keys: Sequence[bytes]
    recorded: Sequence[bytes]
    targets: Callable[[], list[Address]]
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    over: threading.Event = field(default_factory=threading.Event)
    held: deque[socket.socket] = field(default_factory=deque)
    received: dict[bytes, None] = field(default_factory=dict)
    tried: Counter[str] = field(default_factory=Counter)
    let_in: list[str] = field(default_factory=list)

    def attack(self) -> None:
        while not self.over.wait(_PAUSE_S):
            for target, attack in product(self.targets(), ATTACKS):
                self.tried[attack.__name__] += 1
                with suppress(*_REFUSED):
                    attack(self, target)

    def flood(self) -> None:
        """Many connections that say nothing; what they are sent is kept when others replace them.

        Those that are held say a byte now and then: a limit for each byte would not end them.
        """
        while not self.over.wait(_PAUSE_S):
            for sock in self.held:
                with suppress(OSError):
                    sock.send(b"s", socket.MSG_DONTWAIT)
            for target in self.targets():
                with suppress(OSError):
                    for _ in range(50):
                        self.held.append(dial(target))
                        self.tried["silence"] += 1
            while len(self.held) > _HELD:
                with self.held.popleft() as sock:
                    if select.select([sock], [], [], 0)[0]:
                        self.keep(sock)

    def say(self, target: Address, *parts: bytes) -> None:
        """Send these, and keep what comes."""
        with dial(target) as sock:
            for part in parts:
                sock.sendall(part)
            self.keep(sock)

    def keep(self, sock: socket.socket) -> None:
        sock.settimeout(_ANSWER_S)
        with suppress(OSError):
            while len(self.received) < _MOST_RECEIVED and (data := sock.recv(1 << 16)):
                self.received[data] = None


def dial(target: Address) -> socket.socket:
    return socket.create_connection(target, _CONNECT_S)


def one_byte_at_a_time(stranger: Stranger, target: Address) -> None:
    stranger.say(target, *[b"\0"] * 8)


def garbage(stranger: Stranger, target: Address) -> None:
    stranger.say(target, stranger.chance.randbytes(4096))


def huge_lengths(stranger: Stranger, target: Address) -> None:
    """In the place of a handshake, and behind one that proves nothing."""
    frame = pack(Header(FrameKind.PULL), b"", 1 << 40)
    for data in (b"\xff" * 4, bytes(64) + b"\xff" * 8, frame, frame[:-8] + b"\xff" * 8):
        stranger.say(target, data)


def replay(stranger: Stranger, target: Address) -> None:
    for data in stranger.chance.sample(stranger.recorded, min(4, len(stranger.recorded))):
        stranger.say(target, data)


def as_a_rank_at_the_rendezvous(stranger: Stranger, target: Address) -> None:
    for key in stranger.keys:
        with suppress(*_REFUSED), dial(target) as sock:
            request = StoreRequest("set", ["hello/1"], b"stranger")
            StoreLink(sock, key).ask(request, _ANSWER_S)
            stranger.let_in.append(f"rendezvous at {target}")


def as_a_rank_in_the_data_plane(stranger: Stranger, target: Address) -> None:
    for key, (source, to) in product(stranger.keys, ((1, 0), (0, 1))):
        with suppress(*_REFUSED), dial(target) as sock:
            sock.settimeout(_ANSWER_S)
            prove(sock, key, StreamName(source, to, 0))
            stranger.let_in.append(f"data plane at {target}")


def as_a_worker_at_servers(stranger: Stranger, target: Address) -> None:
    for key, channel in product(stranger.keys, _CHANNELS):
        with suppress(*_REFUSED), dial(target) as sock:
            sock.settimeout(_ANSWER_S)
            authenticate(Connection(sock, b""), key, channel, Header(FrameKind.HELLO, 0, 7, 1))
            stranger.let_in.append(f"{channel} at {target}")


ATTACKS: tuple[Callable[[Stranger, Address], None], ...] = (
    *(one_byte_at_a_time, garbage, huge_lengths, replay),
    *(as_a_rank_at_the_rendezvous, as_a_rank_in_the_data_plane, as_a_worker_at_servers),
)
