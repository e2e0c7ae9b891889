"""Hostile frames and floods against server processes whose workers train meanwhile.

    python -m tests.chaos.frames [--count 20000] [--seed 0]

Two servers with few descriptors, one at plain TCP, one at TLS. Each has a worker that pushes and
pulls without pause; its weights have to be those of its own pushes to the last bit. Half of the
`count` frames come before the secret is proven, half after it.
"""

from __future__ import annotations

import random
import resource
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from shoal.errors import ShoalError
from shoal.runtime.config import TlsConfig
from shoal.runtime.secret import fresh_nonce
from shoal.server.protocol import Channel, FrameKind, Header, Hello, Refused, encode, pack
from shoal.server.protocol.connection import Closed, Connection
from shoal.server.protocol.endpoint import PLAIN, connect
from shoal.server.protocol.handshake import authenticate
from tests.chaos import read_numbers
from tests.server.attacked import (
    DESCRIPTORS,
    PATIENCE_S,
    Attacked,
    Training,
    dripping_flood,
    hasty_flood,
    server,
    silent_flood,
)
from tests.server.helpers import SECRET
from tests.server.test_hostile import ATTACKS, NO_UTF8, attack_of, damaged
from tests.server.test_tls import certificate

MAX_GROWTH_MB = 60.0
MAX_WAIT_S = 3.0
CHANNELS: tuple[Channel, ...] = ("control", "push", "pull", "rows", "follow")


def hostile_meta(chance: random.Random, spec: object) -> bytes:
    """Metadata that is wrong, or right for another kind of frame."""
    valid: list[object] = [
        {"step": None, "version": 0},
        {"table": "t", "count": 1, "lr": 0.1},
        {"index": 1, "position": 0},
        {"number": 1},
        {"steps": 0, "tensors": []},
        {"name": "t", "num_rows": 4, "dim": 2},
        spec,
    ]
    chosen = msgspec.msgpack.encode(chance.choice(valid))
    return chance.choice(
        [
            chosen,
            chosen[: chance.randrange(len(chosen))],
            damaged(chosen, chance),
            NO_UTF8,
            b"\x91" * chance.randrange(1, 5_000),
            b"\xdf\xff\xff\xff\xff",  # a map of 2**32 - 1 entries
            b"\xc6\xff\xff\xff\xff",  # 4 GB of bytes
            chance.randbytes(chance.randrange(200)),
            b"",
        ]
    )


def hostile_frame(chance: random.Random, spec: object, header: Header) -> bytes:
    """A frame with a valid checksum as often as not."""
    named = header._replace(
        kind=chance.choice(list(FrameKind)),
        sequence=chance.choice([0, 1, 2**63, 2**64 - 1]),
        argument=chance.choice([0, 1, 60, 2**63]),
        payload_bytes=chance.choice([0, 4, 12, 60, 2**31, 2**40, 2**63]),
        epoch=chance.choice([0, 0, 0, 1, 2**32 - 1]),
        worker=chance.choice([header.worker, header.worker, 2**32 - 1]),
    )
    frame = pack(named, hostile_meta(chance, spec))
    kind = chance.randrange(4)
    if kind == 0:
        return damaged(frame, chance)
    if kind == 1:
        return frame[: chance.randrange(len(frame))]
    return frame + chance.randbytes(chance.choice([0, 4, 12, 60, 1000]))


def read_to_end(sock: socket.socket) -> str:
    """How the server ended the connection; a TimeoutError if it did not."""
    said = False
    try:
        while sock.recv(1 << 16):
            said = True
    except ConnectionError:
        return "reset"
    return "answered and closed" if said else "closed"


def before_the_secret(attacked: Attacked, count: int, chance: random.Random) -> Counter[str]:
    ends: Counter[str] = Counter()
    header = Header(FrameKind.HELLO, 1, 7, 99)
    hellos = [
        encode(Hello(fresh_nonce(), "control", fresh_nonce())),
        encode(Hello(fresh_nonce(), "control", fresh_nonce())).replace(
            b"control", b"contr\xff\xfe"
        ),
    ]
    for i in range(count):
        frame = hostile_frame(chance, attacked.specs[0], header)
        if i % 4 == 0:
            frame = damaged(pack(header, hellos[0]), chance) if i % 8 else pack(header, hellos[1])
        with attacked.connect(is_remote=i % 3 == 0) as sock:
            with suppress(OSError):
                sock.sendall(frame)
                sock.shutdown(socket.SHUT_WR)
            ends[_outcome(sock)] += 1
    return ends


def _outcome(sock: socket.socket) -> str:
    try:
        return read_to_end(sock)
    except TimeoutError:
        return "HANGS"


def after_the_secret(attacked: Attacked, count: int, chance: random.Random) -> Counter[str]:
    """Each from a worker that has joined a model of its own, or from one that has not."""
    ends: Counter[str] = Counter()
    for number in range(count):
        try:
            ends[_as_member(attacked, chance, number)] += 1
        except (Closed, Refused, ConnectionError) as error:
            ends[f"{type(error).__name__} while joining"] += 1
        except (TimeoutError, ShoalError) as error:
            ends[f"WRONG: {error!r}"[:100]] += 1
    return ends


def _as_member(attacked: Attacked, chance: random.Random, number: int) -> str:
    header = Header(FrameKind.HELLO, 0, 1000 + number, 99)
    with ExitStack() as stack:
        joins = number % 4 != 0
        if joins:
            control = _introduced(attacked, "control", header, stack)
            control.send(header._replace(kind=FrameKind.SETUP), encode(attacked.specs[0]))
            control.receive(1 << 16)
        name = chance.choice(list(ATTACKS))
        channel = ATTACKS[name][0]
        if number % 2:
            channel = chance.choice(CHANNELS)
        if not joins or channel != "control":
            control = _introduced(attacked, channel, header, stack)
        with suppress(OSError):
            if number % 2:
                frame = hostile_frame(chance, attacked.specs[0], header)
                control.sock.sendall(frame)
            else:
                control.sock.sendall(attack_of(name, header))
            control.sock.shutdown(socket.SHUT_WR)
        control.sock.settimeout(MAX_WAIT_S)
        try:
            return read_to_end(control.sock)
        except TimeoutError:  # a pull of a version that may come: it has to end with its worker
            return "waits"


def _introduced(
    attacked: Attacked, channel: Channel, header: Header, stack: ExitStack
) -> Connection:
    connection = connect(attacked.local, PLAIN, PATIENCE_S)
    stack.callback(connection.close)
    connection.sock.settimeout(PATIENCE_S)
    authenticate(connection, SECRET, channel, header)
    return connection


# ---- all of it ----------------------------------------------------------------------------------


def settle(attacked: Attacked) -> str:
    """What is wrong with the server after the attacks; empty if nothing is."""
    if attacked.process.poll() is not None:
        return f"the server has ended with status {attacked.process.returncode}"
    deadline_s = time.monotonic() + PATIENCE_S
    while attacked.descriptors() > attacked.start_descriptors:
        if time.monotonic() > deadline_s:
            return f"{attacked.descriptors()} descriptors, {attacked.start_descriptors} before"
        time.sleep(0.1)
    grown_mb = attacked.resident_mb() - attacked.start_mb
    return f"{grown_mb:.0f} MB of memory more than before" if grown_mb > MAX_GROWTH_MB else ""


def attack_all(attacked: list[Attacked], count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    trainings = [Training(one) for one in attacked]
    for one, training in zip(attacked, trainings, strict=True):
        training.start()
        before_the_secret(one, 50, chance)  # what is loaded and allocated once
        after_the_secret(one, 50, chance)
        one.start_mb = one.resident_mb()
        one.start_descriptors = one.descriptors()
    wrong: list[str] = []
    flood = max(10, count // 16)
    for name, kind, number in (
        ("frames before the secret", before_the_secret, count // 4),
        ("frames after the secret", after_the_secret, count // 4),
        ("silent connections", silent_flood, flood),
        ("dripping connections", dripping_flood, flood),
        ("hasty connections", hasty_flood, flood),
    ):
        for one in attacked:
            args = (one, number) if "connections" in name else (one, number, chance)
            ends = kind(*args)
            print(f"{one.name}: {number} {name}: {_listed(ends)}", flush=True)
            wrong += [
                f"{one.name}, {name}: {end}" for end in ends if end.isupper() or "WRONG" in end
            ]
    for one, training in zip(attacked, trainings, strict=True):
        wrong += [f"{one.name}: {problem}" for problem in [settle(one)] if problem]
        training.end()
        wrong += [f"{one.name}: training: {training.wrong}"] if training.wrong else []
        if training.is_alive():
            wrong.append(f"{one.name}: the training hangs")
        print(
            f"{one.name}: {training.steps} steps of training meanwhile, memory "
            f"{one.start_mb:.0f} -> {one.resident_mb():.0f} MB, descriptors "
            f"{one.start_descriptors} -> {one.descriptors()}, at most {one.most_descriptors} of "
            f"{DESCRIPTORS}",
            flush=True,
        )
    return wrong


def _listed(ends: Counter[str]) -> str:
    return ", ".join(f"{number} {end}" for end, number in ends.most_common())


def main(words: list[str] | None = None) -> int:
    options = read_numbers(words, count=20000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="shoal-") as name, ExitStack() as stack:
        folder = Path(name)
        cert, key = certificate(folder, "server")
        secured = TlsConfig(str(cert), str(key), authority=str(cert))
        attacked = [
            stack.enter_context(server(folder, "tcp", PLAIN)),
            stack.enter_context(server(folder, "tls", secured)),
        ]
        wrong = attack_all(attacked, options.count, options.seed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for problem in wrong:
        print(f"WRONG: {problem}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
