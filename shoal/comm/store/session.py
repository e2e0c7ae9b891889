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
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import msgspec

from shoal.runtime.decoders import msgpack_decoder
from shoal.runtime.secret import CODE_BYTES, NONCE_BYTES, Greeting, code_of, is_code

MAGIC = b"shoal-store-1\n\0\0"
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + CODE_BYTES
REFUSED = bytes(CODE_BYTES)
LENGTH_BYTES = 4
MAX_FRAME_BYTES = 16 << 20
NO_KEY = b""  # at loopback, where a run without a key meets

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


def greet(
    send: Callable[[bytes], None], receive: Callable[[int], bytes], secret: bytes
) -> FrameSession:
    """The client's side of a handshake, and its session; BadFrame where the service is another."""
    challenge = receive(GREETING_BYTES)
    if not challenge.startswith(MAGIC):
        raise BadFrame("this is not the store of a rendezvous of Shoal")
    greeting = Greeting(secret, MAGIC)
    send(greeting.hello(challenge))
    welcome = receive(CODE_BYTES)
    if welcome == REFUSED:
        raise BadFrame("it has another key, or none")
    if not greeting.is_welcome(welcome):
        raise BadFrame("it does not know the key of this run")
    return FrameSession(greeting.session_key, "client")


class FrameSession:
    """Packs and unpacks the frames of one connection, for the side that is named."""

    def __init__(self, key: bytes, side: Literal["client", "service"]):
        self._key = key
        self._side = side
        self._other = "service" if side == "client" else "client"
        self._sent = 0
        self._received = 0

    def pack(self, message: StoreRequest | StoreReply) -> bytes:
        body = msgspec.msgpack.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise BadFrame(f"{len(body)} bytes are too many for the store of the rendezvous")
        code = code_of(self._key, self._side, self._sent.to_bytes(8, "little"), body)
        self._sent += 1
        return len(body).to_bytes(LENGTH_BYTES, "little") + body + code

    def unpack(self, kind: type[Message], frame: bytes) -> Message:
        """`frame` is what follows its length."""
        body, code = frame[:-CODE_BYTES], frame[-CODE_BYTES:]
        number = self._received.to_bytes(8, "little")
        if not is_code(code, self._key, self._other, number, body):
            raise BadFrame("a frame is not of the other side of this connection")
        self._received += 1
        try:
            return msgpack_decoder(kind).decode(body)
        except msgspec.DecodeError as error:
            raise BadFrame(str(error)) from error


def frame_bytes(length: bytes) -> int:
    """How many bytes follow the length: body and code; BadFrame if they are too many."""
    body_bytes = int.from_bytes(length, "little")
    if body_bytes > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {body_bytes} bytes")
    return body_bytes + CODE_BYTES


SILENT_HOST_S = 3  # a host from which nothing comes for so long is lost
LINK_SILENT_S = 30  # the same, where nothing but an answer depends on it
_PROBES = 3


def notice_silence(sock: socket.socket, silent_s: int = SILENT_HOST_S) -> None:
    """The connection breaks when the other host has been silent for so long."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", silent_s // _PROBES),
        ("TCP_KEEPINTVL", silent_s // _PROBES),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", silent_s * 1000),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
