"""The first frames of every connection, on both sides."""

from __future__ import annotations

from shoal.errors import ShoalError
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.frames import Header, Kind, Refused, decode, encode, pack
from shoal.server.protocol.messages import MOST_HELLO_BYTES, Challenge, Error, Hello, Lane, Welcome
from shoal.server.protocol.secret import fresh_nonce, is_proof, proof

HANDSHAKE_S = 5.0
RETURN_S = 3.0  # for a worker whose TCP connection broke to connect again, before it counts as lost


class NotProven(ShoalError):
    """The other side does not know the secret of this run."""


def greet(connection: Connection, secret: bytes) -> tuple[Hello, Header]:
    """The server's part; Refused unless the other side proves the secret."""
    nonce = fresh_nonce()
    connection.send(Header(Kind.CHALLENGE), encode(Challenge(nonce)))
    header, meta = connection.receive(MOST_HELLO_BYTES)
    if header.kind is not Kind.HELLO or header.payload_bytes:
        raise Refused("the first frame was no hello")
    hello = decode(meta, Hello)
    if not is_proof(hello.proof, secret, "worker", nonce, *_said(hello.nonce, hello.lane, header)):
        raise Refused("a hello that does not prove the secret")
    answer = proof(secret, "server", nonce, *_said(hello.nonce, hello.lane, header))
    connection.send(Header(Kind.WELCOME), encode(Welcome(answer)))
    return hello, header


def introduce(connection: Connection, secret: bytes, lane: Lane, header: Header) -> None:
    """The worker's part; NotProven unless the server proves the secret as well."""
    found, meta = connection.receive(MOST_HELLO_BYTES)
    if found.kind is not Kind.CHALLENGE or found.payload_bytes:
        raise Refused("a server's first frame was no challenge")
    theirs = decode(meta, Challenge).nonce
    ours = fresh_nonce()
    said = _said(ours, lane, header)
    connection.send(header, encode(Hello(ours, lane, proof(secret, "worker", theirs, *said))))
    found, meta = connection.receive(8192)
    if found.kind is Kind.ERROR:
        raise NotProven(f"the server refuses this worker: {decode(meta, Error).sentence}")
    if found.kind is not Kind.WELCOME or found.payload_bytes:
        raise Refused("a server's second frame was no welcome")
    if not is_proof(decode(meta, Welcome).proof, secret, "server", theirs, *said):
        raise NotProven("the server does not know the secret of this run")


def _said(nonce: bytes, lane: str, header: Header) -> tuple[bytes, bytes, bytes]:
    """What the proof covers: who speaks, and through which connection."""
    who = pack(Header(Kind.HELLO, header.worker, header.model, header.incarnation))
    return nonce, lane.encode(), who
