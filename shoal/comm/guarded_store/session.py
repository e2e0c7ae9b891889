"""Who may speak to the store of the rendezvous: a handshake, then frames with codes.

    service -> client    magic, nonce                             before anything else counts
    client -> service    nonce, proof of the key                  64 bytes, and never more
    service -> client    proof of the key; zeros: refused
    both ways            length (4 bytes) | msgpack | code        under a key of this connection

Nonces are fresh, so a recorded handshake cannot be replayed. The code of a frame covers its
direction and its number, so frames cannot be changed, repeated or sent into another connection.
"""

from __future__ import annotations

import socket
from typing import Literal

import msgspec

from shoal.runtime.decoders import msgpack_decoder
from shoal.runtime.proof import NONCE_BYTES, fresh_nonce, is_proof, proof

MAGIC = b"shoal-store-1\n\0\0"
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
PROOF_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
REFUSED = bytes(PROOF_BYTES)
LENGTH_BYTES = 4
MAX_FRAME_BYTES = 16 << 20
MAX_KEYS = 4096
NO_KEY = b""  # at loopback, where a run without a key meets

KeyOperation = Literal["set", "get", "wait", "check", "add", "delete", "count", "compare_set"]
LogOperation = Literal["append", "read"]
Operation = KeyOperation | LogOperation | Literal["present"]
AT_THE_END = -1  # for `append`: wherever the end of the log is


class StoreRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a rank asks of the store."""

    operation: Operation
    keys: list[str] = []
    value: bytes = b""
    expected: bytes = b""
    number: int = 0


class StoreReply(msgspec.Struct, frozen=True, array_like=True):
    """What it answers; `refusal` is a sentence where the request makes no sense."""

    value: bytes = b""
    number: int = 0
    refusal: str = ""
    values: list[bytes] = []


class BadFrame(Exception):
    """What came is not what the other side of this connection sends."""


class ServiceGreeting:
    """The service's side of a handshake."""

    def __init__(self, secret: bytes):
        self._secret = secret
        self._nonce = fresh_nonce()
        self.greeting = MAGIC + self._nonce

    def accept(self, answer: bytes) -> tuple[bytes, FrameSession]:
        """The last message of the handshake, and the session; BadFrame without a proof."""
        nonce, given = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        nonces = (self._nonce, nonce)
        if not is_proof(given, self._secret, "store client", *nonces):
            raise BadFrame("the client does not prove the key")
        return proof(self._secret, "store service", *nonces), FrameSession(
            proof(self._secret, "store session", *nonces), "service"
        )


class ClientGreeting:
    """The client's side of a handshake."""

    def __init__(self, secret: bytes, greeting: bytes):
        if not greeting.startswith(MAGIC):
            raise BadFrame("this is not the store of a rendezvous of Shoal")
        self._secret = secret
        nonce = fresh_nonce()
        self._nonces = (greeting[len(MAGIC) :], nonce)
        self.answer = nonce + proof(secret, "store client", *self._nonces)

    def finish(self, given: bytes) -> FrameSession:
        if given == REFUSED:
            raise BadFrame("it has another key, or none")
        if not is_proof(given, self._secret, "store service", *self._nonces):
            raise BadFrame("it does not know the key of this run")
        return FrameSession(proof(self._secret, "store session", *self._nonces), "client")


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
        code = proof(self._key, self._side, self._sent.to_bytes(8, "little"), body)
        self._sent += 1
        return len(body).to_bytes(LENGTH_BYTES, "little") + body + code

    def unpack_request(self, body: bytes, code: bytes) -> StoreRequest:
        self._check(body, code)
        try:
            request = msgpack_decoder(StoreRequest).decode(body)
        except msgspec.DecodeError as error:
            raise BadFrame(str(error)) from error
        if len(request.keys) > MAX_KEYS:
            raise BadFrame(f"{len(request.keys)} keys are too many")
        return request

    def unpack_reply(self, body: bytes, code: bytes) -> StoreReply:
        self._check(body, code)
        try:
            return msgpack_decoder(StoreReply).decode(body)
        except msgspec.DecodeError as error:
            raise BadFrame(str(error)) from error

    def _check(self, body: bytes, code: bytes) -> None:
        number = self._received.to_bytes(8, "little")
        if not is_proof(code, self._key, self._other, number, body):
            raise BadFrame("a frame is not of the other side of this connection")
        self._received += 1


def frame_bytes(length: bytes) -> int:
    """How many bytes follow the length: body and code; BadFrame if they are too many."""
    body_bytes = int.from_bytes(length, "little")
    if body_bytes > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {body_bytes} bytes")
    return body_bytes + PROOF_BYTES


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
