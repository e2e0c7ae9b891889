"""One connection to a store, without torch."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

from shoal.comm.store.session import (
    LENGTH_BYTES,
    LINK_SILENT_S,
    BadFrame,
    StoreReply,
    StoreRequest,
    frame_bytes,
    greet,
    notice_silence,
)
from shoal.errors import BadInput, ShoalError
from shoal.runtime.waits import Backoff

_HANDSHAKE_S = 5.0
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5


class StoreLink:
    """One connection, after its handshake."""

    def __init__(self, sock: socket.socket, secret: bytes):
        self._sock = sock
        self._session = greet(sock.sendall, self._receive, secret)

    def ask(self, request: StoreRequest, limit_s: float | None) -> StoreReply:
        """TimeoutError where no answer comes: then the link cannot be used again."""
        self._sock.settimeout(limit_s)
        self._sock.sendall(self._session.pack(request))
        frame = self._receive(frame_bytes(self._receive(LENGTH_BYTES)))
        return self._session.unpack(StoreReply, frame)

    def notice_silence(self) -> None:
        """From now on the connection breaks when the other host is silent for a few seconds."""
        notice_silence(self._sock)

    def interrupt(self) -> None:
        """A thread that waits for an answer gets a ConnectionError."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _receive(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._sock.recv(count - len(data))
            if not part:
                raise ConnectionResetError("the other side has ended")
            data += part
        return bytes(data)


def connect(address: tuple[str, int], secret: bytes, limit_s: float) -> StoreLink:
    """BadInput where another key listens there; tried again where nothing does."""
    deadline_s = time.monotonic() + limit_s
    pause = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while True:
        try:
            return _connect_once(address, secret)
        except OSError as error:
            if time.monotonic() > deadline_s:
                where = f"{address[0]}:{address[1]}"
                raise ShoalError(
                    f"no rendezvous at {where} after {limit_s:g} s ({error}): is rank 0 started, "
                    "and do its host and port have this address?"
                ) from error
        pause()


def _connect_once(address: tuple[str, int], secret: bytes) -> StoreLink:
    sock = socket.create_connection(address, _HANDSHAKE_S)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_silence(sock, LINK_SILENT_S)
        return StoreLink(sock, secret)
    except BadFrame as error:
        sock.close()
        raise BadInput(
            f"the process that listens at {address[0]}:{address[1]} is not the rendezvous of this "
            f"run: {error} (`shoal keys show` tells keys apart)"
        ) from error
    except BaseException:
        with suppress(OSError):
            sock.close()
        raise
