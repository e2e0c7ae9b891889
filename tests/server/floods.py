"""Floods: connections that say nothing, that drip, that are reset."""

from __future__ import annotations

import socket
import ssl
import struct
from collections import Counter
from contextlib import suppress

from shoal.errors import ShoalError
from shoal.protocol import FrameKind, Header, pack
from tests.server.attacked import Attacked, open_client


def silent_flood(attacked: Attacked, count: int) -> Counter[str]:
    """Connections that say nothing, all held open; every 100 an honest worker joins."""
    ends: Counter[str] = Counter()
    held: list[socket.socket] = []
    try:
        for i in range(count):
            try:
                held.append(attacked.connect(is_remote=True))
                ends["connected"] += 1
            except OSError as error:
                ends[type(error).__name__] += 1
            if i % 100 == 99:
                attacked.descriptors()
                ends[_honest_join(attacked, 100_000 + i)] += 1
    finally:
        for sock in held:
            sock.close()
    return ends


def dripping_flood(attacked: Attacked, count: int) -> Counter[str]:
    """A TLS record or a frame that never ends: a byte now and then."""
    ends: Counter[str] = Counter()
    half = b"\x16\x03\x01\x02\x00" if attacked.tls.certificate else pack(Header(FrameKind.HELLO))
    held: list[socket.socket] = []
    for i in range(count):
        with suppress(OSError):
            sock = attacked.connect(is_remote=True)
            held.append(sock)
            sock.sendall(half[: 1 + i % (len(half) - 1)])
        if held:
            with suppress(OSError):
                held[i // 2].sendall(b"\x00")
        ends["dripped"] += 1
        if i % 100 == 99:
            attacked.descriptors()
    ends[_honest_join(attacked, 200_000)] += 1
    for sock in held:
        sock.close()
    return ends


def hasty_flood(attacked: Attacked, count: int) -> Counter[str]:
    """Connections that are reset at once."""
    ends: Counter[str] = Counter()
    for i in range(count):
        with suppress(OSError):
            sock = attacked.connect(is_remote=True)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            ends["reset"] += 1
        if i % 100 == 99:
            attacked.descriptors()
    ends[_honest_join(attacked, 300_000)] += 1
    return ends


def _honest_join(attacked: Attacked, model: int) -> str:
    try:
        client = open_client(attacked, attacked.remote, model)
        client.leave()
        client.close()
    except (ShoalError, OSError, ssl.SSLError) as error:
        return f"WRONG: an honest worker was kept out ({error})"[:200]
    return "honest workers served"
