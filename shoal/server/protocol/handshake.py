"""Both sides prove that they know the run's secret before any other frame counts.

    server -> worker   CHALLENGE  server's nonce
    worker -> server   HELLO      worker's nonce, who it is, HMAC over all of it
    server -> worker   WELCOME    HMAC over the same, with the server's name for it

Nonces are fresh, so a recorded handshake cannot be replayed. Under TLS the server's certificate
is part of both proofs, so a relay cannot pass them on. The secret itself never travels: it
is in the run directory (`RunDir.read_secret`), in the environment, or in a file of each host.
"""

from __future__ import annotations

from shoal.errors import ShoalError
from shoal.runtime.proof import fresh_nonce, is_proof, proof
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.frames import FrameKind, Header, Refused, decode, encode, pack
from shoal.server.protocol.hello import (
    MAX_HELLO_BYTES,
    Challenge,
    Channel,
    ErrorReply,
    Hello,
    Welcome,
)

HANDSHAKE_S = 5.0
RECONNECT_S = 3.0  # a worker whose TCP connection broke is lost after so long
_MAX_WELCOME_BYTES = 8192


class AuthenticationError(ShoalError):
    """The other side does not know the secret of this run."""


def authenticate_peer(connection: Connection, secret: bytes) -> tuple[Hello, Header]:
    """The server's side; Refused if the worker does not prove the secret."""
    nonce = fresh_nonce()
    connection.send(Header(FrameKind.CHALLENGE), encode(Challenge(nonce)))
    header, meta = connection.receive_within(MAX_HELLO_BYTES, HANDSHAKE_S)
    _expect(header, FrameKind.HELLO)
    hello = decode(meta, Hello)
    claims = _claims(connection, hello.nonce, hello.channel, header)
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
    claims = _claims(connection, nonce, channel, header)
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


def _claims(
    connection: Connection, nonce: bytes, channel: Channel, header: Header
) -> tuple[bytes, ...]:
    """What the proof covers: which worker connects, for which channel, to which certificate."""
    identity = pack(Header(FrameKind.HELLO, header.worker, header.model, header.incarnation))
    claims = (nonce, channel.encode(), identity)
    return (*claims, connection.certificate) if connection.certificate else claims
