"""Both sides prove that they know the run's secret before any other frame counts.

    server -> worker   CHALLENGE  server's nonce
    worker -> server   HELLO      worker's nonce, who it is, HMAC over all of it
    server -> worker   WELCOME    HMAC over the same, with the server's name for it

See `runtime/secret.py`. Under TLS the server's certificate is part of both codes, so a relay
cannot pass them on. The secret is in the run directory (`RunDir.read_secret`), in the environment,
or in a file of each host.
"""

from __future__ import annotations

from shoal.errors import ShoalError
from shoal.runtime.config import TlsConfig
from shoal.runtime.secret import CODE_BYTES, NONCE_BYTES, Greeting
from shoal.server.protocol import (
    MAX_HELLO_BYTES,
    Challenge,
    Channel,
    ErrorReply,
    FrameKind,
    Header,
    Hello,
    Refused,
    Welcome,
    decode,
    encode,
    pack,
)
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.endpoint import CONNECT_S, connect

HANDSHAKE_S = 5.0
RECONNECT_S = 3.0  # a worker whose TCP connection broke is lost after so long
_MAX_WELCOME_BYTES = 8192


class AuthenticationError(ShoalError):
    """The other side does not know the secret of this run."""


def authenticate_peer(connection: Connection, secret: bytes) -> tuple[Hello, Header]:
    """The server's side; Refused if the worker does not prove the secret."""
    greeting = Greeting(secret, bound=connection.certificate)
    connection.send(Header(FrameKind.CHALLENGE), encode(Challenge(greeting.challenge)))
    header, meta = connection.receive_within(MAX_HELLO_BYTES, HANDSHAKE_S)
    _expect(header, FrameKind.HELLO)
    hello = decode(meta, Hello)
    if greeting.accept(hello.nonce + claim_of(hello.channel, header) + hello.code) is None:
        raise Refused("HELLO does not prove the secret")
    connection.send(Header(FrameKind.WELCOME), encode(Welcome(greeting.welcome)))
    return hello, header


def authenticate(connection: Connection, secret: bytes, channel: Channel, header: Header) -> None:
    """The worker's side; AuthenticationError if the server does not prove the secret as well."""
    received, meta = connection.receive(MAX_HELLO_BYTES)
    _expect(received, FrameKind.CHALLENGE)
    greeting = Greeting(secret, bound=connection.certificate)
    said = greeting.hello(decode(meta, Challenge).nonce, claim_of(channel, header))
    connection.send(header, encode(Hello(said[:NONCE_BYTES], channel, said[-CODE_BYTES:])))
    received, meta = connection.receive(_MAX_WELCOME_BYTES)
    if received.kind is FrameKind.ERROR:
        reason = decode(meta, ErrorReply).reason
        raise AuthenticationError(f"the server refuses this worker: {reason}")
    _expect(received, FrameKind.WELCOME)
    if not greeting.is_welcome(decode(meta, Welcome).code):
        raise AuthenticationError("the server does not know the secret of this run")


def claim_of(channel: Channel, header: Header) -> bytes:
    """Which worker connects, and for which channel."""
    identity = pack(Header(FrameKind.HELLO, header.worker, header.model, header.incarnation))
    return identity + channel.encode()


def _expect(header: Header, kind: FrameKind) -> None:
    if header.kind is not kind:
        raise Refused(f"expected {kind.name}, got {header.kind.name}")
    if header.payload_bytes:
        raise Refused(f"{kind.name} has no payload")


def dial(
    address: str, secret: bytes, channel: Channel, header: Header, tls: TlsConfig, timeout_s: float
) -> Connection:
    """A connection that has proven the secret; its socket still has the timeout."""
    connection = connect(address, tls, min(timeout_s, CONNECT_S))
    try:
        connection.sock.settimeout(timeout_s)
        authenticate(connection, secret, channel, header)
    except BaseException:
        connection.close()
        raise
    return connection
