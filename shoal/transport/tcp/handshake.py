"""Both sides of a connection prove that they know the key before it carries anything.

    who accepts  -> CHALLENGE  nonce
    who connects -> HELLO      nonce, its rank, the other's rank, stream, HMAC over all of it
    who accepts  -> WELCOME    HMAC over the same, under another name

All three have a fixed length. Nonces are fresh, so a recorded handshake cannot be replayed; ranks
and stream are part of the proof, so one connection cannot pass for another. The key is drawn from
the secret of the run and from what rank 0 drew for this start, so an old start has another one.
Under TLS the certificate of who accepts is part of the proofs, too.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass

from shoal.errors import ShoalError
from shoal.runtime.proof import NONCE_BYTES, fresh_nonce, is_proof, proof

HANDSHAKE_S = 10.0
_MAGIC = b"shoaltcp"
_PROOF_BYTES = 32
_HELLO = struct.Struct("<III")  # source rank, target rank, stream
_HELLO_BYTES = NONCE_BYTES + _HELLO.size + _PROOF_BYTES


class Stranger(ShoalError):
    """The other side of a connection has not proven the key."""


@dataclass(frozen=True)
class StreamName:
    """Which connection of which pair: `source` connects to `target`."""

    source: int
    target: int
    stream: int

    def pack(self) -> bytes:
        return _HELLO.pack(self.source, self.target, self.stream)


def prove(sock: socket.socket, key: bytes, name: StreamName, certificate: bytes = b"") -> None:
    """The side that connects; Stranger if the other one does not prove the key as well."""
    challenge = _read(sock, len(_MAGIC) + NONCE_BYTES)
    if not challenge.startswith(_MAGIC):
        raise Stranger("the other side is not a rank of Shoal")
    nonce = fresh_nonce()
    claims = (challenge, nonce, name.pack(), certificate)
    sock.sendall(nonce + name.pack() + proof(key, "connects", *claims))
    if not is_proof(_read(sock, _PROOF_BYTES), key, "accepts", *claims):
        raise Stranger("the other side does not know the secret of this run")


def accept(sock: socket.socket, key: bytes, certificate: bytes = b"") -> StreamName:
    """The side that accepts: which stream this is."""
    challenge = _MAGIC + fresh_nonce()
    sock.sendall(challenge)
    hello = _read(sock, _HELLO_BYTES)
    nonce = hello[:NONCE_BYTES]
    packed = hello[NONCE_BYTES : NONCE_BYTES + _HELLO.size]
    claims = (challenge, nonce, packed, certificate)
    if not is_proof(hello[-_PROOF_BYTES:], key, "connects", *claims):
        raise Stranger("the other side does not know the secret of this run")
    sock.sendall(proof(key, "accepts", *claims))
    return StreamName(*_HELLO.unpack(packed))


def _read(sock: socket.socket, num_bytes: int) -> bytes:
    """In HANDSHAKE_S altogether: single bytes now and then do not keep a connection."""
    data = bytearray()
    deadline_s = time.monotonic() + HANDSHAKE_S
    while len(data) < num_bytes:
        if time.monotonic() > deadline_s:
            raise Stranger("the handshake took too long")
        received = sock.recv(num_bytes - len(data))
        if not received:
            raise Stranger("the connection ended before the handshake did")
        data += received
    return bytes(data)
