"""Both sides prove that they know the run's secret before any other frame counts.

    server -> worker   CHALLENGE  server's nonce
    worker -> server   HELLO      worker's nonce, who it is, HMAC over all of it
    server -> worker   WELCOME    HMAC over the same, with the server's name for it

Nonces are fresh, so a recorded handshake cannot be replayed. The secret itself never travels:
it is in the run directory (`RunDir.read_secret`), or in the environment.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from shoal.errors import ShoalError
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.frames import FrameKind, Header, Refused, decode, encode, pack
from shoal.server.protocol.messages import (
    MAX_HELLO_BYTES,
    Challenge,
    Channel,
    ErrorReply,
    Hello,
    Welcome,
)

HANDSHAKE_S = 5.0
RECONNECT_S = 3.0  # a worker whose TCP connection broke is lost after so long
NONCE_BYTES = 32
_MAX_WELCOME_BYTES = 8192


class AuthenticationError(ShoalError):
    """The other side does not know the secret of this run."""


def authenticate_peer(connection: Connection, secret: bytes) -> tuple[Hello, Header]:
    """The server's side; Refused if the worker does not prove the secret."""
    nonce = fresh_nonce()
    connection.send(Header(FrameKind.CHALLENGE), encode(Challenge(nonce)))
    header, meta = connection.receive(MAX_HELLO_BYTES)
    _expect(header, FrameKind.HELLO)
    hello = decode(meta, Hello)
    claims = _claims(hello.nonce, hello.channel, header)
    if not is_proof(hello.proof, secret, "worker", nonce, *claims):
        raise Refused("HELLO does not prove the secret")
    answer = proof(secret, "server", nonce, *claims)
    connection.send(Header(FrameKind.WELCOME), encode(Welcome(answer)))
    return hello, header


def authenticate(connection: Connection, secret: bytes, channel: Channel, header: Header) -> None:
    """The worker's side; AuthenticationError if the server does not prove the secret as well."""
    received, meta = connection.receive(MAX_HELLO_BYTES)
    _expect(received, FrameKind.CHALLENGE)
    challenge = decode(meta, Challenge).nonce
    nonce = fresh_nonce()
    claims = _claims(nonce, channel, header)
    hello = Hello(nonce, channel, proof(secret, "worker", challenge, *claims))
    connection.send(header, encode(hello))
    received, meta = connection.receive(_MAX_WELCOME_BYTES)
    if received.kind is FrameKind.ERROR:
        reason = decode(meta, ErrorReply).reason
        raise AuthenticationError(f"the server refuses this worker: {reason}")
    _expect(received, FrameKind.WELCOME)
    if not is_proof(decode(meta, Welcome).proof, secret, "server", challenge, *claims):
        raise AuthenticationError("the server does not know the secret of this run")


def _expect(header: Header, kind: FrameKind) -> None:
    if header.kind is not kind:
        raise Refused(f"expected {kind.name}, got {header.kind.name}")
    if header.payload_bytes:
        raise Refused(f"{kind.name} has no payload")


def _claims(nonce: bytes, channel: Channel, header: Header) -> tuple[bytes, bytes, bytes]:
    """What the proof covers: which worker connects, and for which channel."""
    identity = pack(Header(FrameKind.HELLO, header.worker, header.model, header.incarnation))
    return nonce, channel.encode(), identity


def fresh_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, side: str, *claims: bytes) -> bytes:
    """HMAC of `claims`, each with its length, under the name of one side."""
    code = hmac.new(secret, side.encode(), hashlib.sha256)
    for claim in claims:
        code.update(len(claim).to_bytes(8, "little") + claim)
    return code.digest()


def is_proof(given: bytes, secret: bytes, side: str, *claims: bytes) -> bool:
    return hmac.compare_digest(given, proof(secret, side, *claims))
