"""A process on another host that does not have the key of a run, and tries everything.

    python -m tests.lab.stranger FOLDER NUMBER KEY

FOLDER/targets has a line "host port" for everything that listens on the hosts of the run, and
FOLDER/recorded what ranks have sent in an earlier run with the same key. KEY is empty, or another
key. It prints a line for each round, and goes on until its stdin ends. Then it prints a JSON
document: what it tried, and how often it was let in. FOLDER/received.NUMBER has everything that it
was sent. Loads no torch.
"""

from __future__ import annotations

import json
import random
import select
import socket
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shoal.comm.store.link import StoreLink
from shoal.comm.store.session import BadFrame, StoreRequest
from shoal.errors import ShoalError
from shoal.protocol import Channel, FrameKind, Header, pack
from shoal.protocol.connection import Connection
from shoal.protocol.handshake import authenticate
from shoal.transport.tcp.connect import StreamName, prove

Address = tuple[str, int]
CONNECT_S = 0.5
ANSWER_S = 0.2
HELD = 400  # connections that say nothing, at a time
_PAUSE_S = 0.02
_MOST_RECEIVED = 100_000  # messages
_CHANNELS: tuple[Channel, ...] = ("control", "push", "pull", "rows", "follow", "coordinator")


@dataclass
class Stranger:
    key: bytes
    recorded: list[bytes]
    chance: random.Random
    held: deque[socket.socket] = field(default_factory=deque)
    received: dict[bytes, None] = field(default_factory=dict)
    connections: int = 0  # that have said nothing
    tried: Counter[str] = field(default_factory=Counter)
    let_in: list[str] = field(default_factory=list)

    def attack(self, target: Address) -> None:
        for attack in ATTACKS:
            self.tried[attack.__name__] += 1
            with suppress(OSError, ShoalError, BadFrame):
                attack(self, target)

    def flood(self, targets: Callable[[], Iterator[Address]], over: threading.Event) -> None:
        """Connections that say nothing, as many as come about."""
        while not over.wait(_PAUSE_S):
            for target in targets():
                with suppress(OSError):
                    silence(self, target)

    def say(self, target: Address, *parts: bytes) -> None:
        """Send these, and keep what comes."""
        with dial(target) as sock:
            for part in parts:
                sock.sendall(part)
            self.keep(sock)

    def keep(self, sock: socket.socket) -> None:
        sock.settimeout(ANSWER_S)
        with suppress(OSError):
            while len(self.received) < _MOST_RECEIVED and (data := sock.recv(1 << 16)):
                self.received[data] = None


def dial(target: Address) -> socket.socket:
    return socket.create_connection(target, CONNECT_S)


def silence(stranger: Stranger, target: Address) -> None:
    """Many connections; what they are sent is kept when others take their place.

    Those that are held say a byte now and then: a limit for each byte would not end them.
    """
    for sock in stranger.held:
        with suppress(OSError):
            sock.send(b"s", socket.MSG_DONTWAIT)
    for _ in range(50):
        stranger.held.append(dial(target))
        stranger.connections += 1
    while len(stranger.held) > HELD:
        with stranger.held.popleft() as sock:
            if select.select([sock], [], [], 0)[0]:
                stranger.keep(sock)


def one_byte_at_a_time(stranger: Stranger, target: Address) -> None:
    with dial(target) as sock:
        for _ in range(8):
            sock.sendall(b"\0")
        stranger.keep(sock)


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
    with dial(target) as sock:
        link = StoreLink(sock, stranger.key)
        link.ask(StoreRequest("set", ["hello/1"], b"stranger"), ANSWER_S)
        stranger.let_in.append(f"rendezvous at {target}")


def as_a_rank_in_the_data_plane(stranger: Stranger, target: Address) -> None:
    for source, to in ((1, 0), (0, 1)):
        with dial(target) as sock, suppress(ShoalError):
            sock.settimeout(ANSWER_S)
            prove(sock, stranger.key, StreamName(source, to, 0))
            stranger.let_in.append(f"data plane at {target}")


def as_a_worker_at_servers(stranger: Stranger, target: Address) -> None:
    for channel in _CHANNELS:
        with dial(target) as sock, suppress(ShoalError):
            sock.settimeout(ANSWER_S)
            hello = Header(FrameKind.HELLO, 0, 7, 1)
            authenticate(Connection(sock, b""), stranger.key, channel, hello)
            stranger.let_in.append(f"{channel} at {target}")


ATTACKS: tuple[Callable[[Stranger, Address], None], ...] = (
    *(one_byte_at_a_time, garbage, huge_lengths, replay),
    *(as_a_rank_at_the_rendezvous, as_a_rank_in_the_data_plane, as_a_worker_at_servers),
)


def targets_in(path: Path) -> Iterator[Address]:
    for line in path.read_text().splitlines():
        host, port = line.split()
        yield host, int(port)


def main() -> None:
    folder, number, key = Path(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3])
    recorded = [path.read_bytes() for path in sorted((folder / "recorded").iterdir())]
    stranger = Stranger(key, recorded, random.Random(number))
    targets = partial(targets_in, folder / "targets")
    over = threading.Event()
    flooding = threading.Thread(target=stranger.flood, args=(targets, over))
    flooding.start()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], _PAUSE_S)[0]:
        if found := list(targets()):
            for target in found:
                stranger.attack(target)
            print("round", flush=True)
    over.set()
    flooding.join()
    for sock in stranger.held:
        sock.close()
    (folder / f"received.{number}").write_bytes(b"\n".join(stranger.received))
    tried = {**stranger.tried, "silence": stranger.connections}
    print(json.dumps({"tried": tried, "let_in": stranger.let_in}))


if __name__ == "__main__":
    main()
