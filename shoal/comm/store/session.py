"""Who may speak to the store of the rendezvous: a handshake, then frames with codes.

    service -> client    magic, nonce                             before anything else counts
    client -> service    nonce, code under the key                64 bytes, and never more
    service -> client    code under the key; zeros: refused       see runtime/secret.py
    both ways            length (4 bytes) | msgpack | code        under a key of this connection

The code of a frame covers its direction and its number, so frames cannot be changed, repeated or
sent into another connection.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Annotated, Literal, TypeVar

import msgspec

from shoal.errors import BadInput, ShoalError
from shoal.runtime.acceptor import notice_silence
from shoal.runtime.decoders import decode_msgpack
from shoal.runtime.secret import CODE_BYTES, Greeting, Stranger, code_of, is_code, receive
from shoal.runtime.waits import Backoff

MAGIC = b"shoal-store-1\n\0\0"
_HANDSHAKE_S = 5.0
LENGTH_BYTES = 4
MAX_FRAME_BYTES = 16 << 20

KeyOperation = Literal["set", "get", "wait", "check", "add", "delete"]
LogOperation = Literal["append", "read"]
Operation = KeyOperation | LogOperation | Literal["present"]
AT_THE_END = -1  # for `append`: wherever the end of the log is


class StoreRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a rank asks of the store."""

    operation: Operation
    keys: Annotated[list[str], msgspec.Meta(max_length=4096)] = []
    value: bytes = b""
    number: int = 0


class StoreReply(msgspec.Struct, frozen=True, array_like=True):
    """What it answers; `refusal` is a sentence where the request makes no sense."""

    value: bytes = b""
    number: int = 0
    refusal: str = ""
    values: list[bytes] = []


Message = TypeVar("Message", StoreRequest, StoreReply)


class BadFrame(Exception):
    """What came is not what the other side of this connection sends."""


class FrameSession:
    """The frames of one connection after its handshake, for the side that is named."""

    def __init__(self, sock: socket.socket, key: bytes, side: Literal["client", "service"]):
        self._sock = sock
        self._key = key
        self._side = side
        self._other = "service" if side == "client" else "client"
        self._sent = 0
        self._received = 0

    def send(self, message: StoreRequest | StoreReply) -> None:
        self._sock.sendall(self.pack(message))

    def receive(self, kind: type[Message]) -> Message:
        body_bytes = int.from_bytes(receive(self._sock, LENGTH_BYTES), "little")
        if body_bytes > MAX_FRAME_BYTES:
            raise BadFrame(f"a frame of {body_bytes} bytes")
        body = receive(self._sock, body_bytes)
        number = self._received.to_bytes(8, "little")
        code = receive(self._sock, CODE_BYTES)
        if not is_code(code, self._key, self._other, number, body):
            raise BadFrame("a frame is not of the other side of this connection")
        self._received += 1
        try:
            return decode_msgpack(body, kind)
        except ValueError as error:
            raise BadFrame(str(error)) from error

    def pack(self, message: StoreRequest | StoreReply) -> bytes:
        body = msgspec.msgpack.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise BadFrame(f"{len(body)} bytes are too many for the store of the rendezvous")
        code = code_of(self._key, self._side, self._sent.to_bytes(8, "little"), body)
        self._sent += 1
        return len(body).to_bytes(LENGTH_BYTES, "little") + body + code


class StoreLink(FrameSession):
    """The client's side of one connection; Stranger where the service is another."""

    def __init__(self, sock: socket.socket, secret: bytes):
        greeting = Greeting(secret, MAGIC)
        greeting.connect(sock, limit_s=_HANDSHAKE_S)
        super().__init__(sock, greeting.session_key, "client")

    def ask(self, request: StoreRequest, limit_s: float | None) -> StoreReply:
        """TimeoutError where no answer comes: then the link cannot be used again."""
        self._sock.settimeout(limit_s)
        self.send(request)
        return self.receive(StoreReply)

    def notice_silence(self) -> None:
        """From now on the connection breaks when the other host is silent for a few seconds."""
        notice_silence(self._sock, SILENT_HOST_S)

    def interrupt(self) -> None:
        """A thread that waits for an answer gets a ConnectionError."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


SILENT_HOST_S = 3  # a host from which nothing comes for so long is lost
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5


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
        notice_silence(sock)
        return StoreLink(sock, secret)
    except Stranger as error:
        sock.close()
        raise BadInput(
            f"the process that listens at {address[0]}:{address[1]} is not the rendezvous of this "
            f"run: {error} (`shoal keys show` tells keys apart)"
        ) from error
    except BaseException:
        with suppress(OSError):
            sock.close()
        raise
