"""How both sides of a connection prove that they know a key, which itself never travels.

    who accepts  -> challenge    magic, nonce
    who connects -> hello        nonce, claim (who it is), code
    who accepts  -> welcome      code over the same, under another name

Nonces are fresh, so a recorded handshake cannot be replayed. The claim is part of the codes, so one
connection cannot pass for another. A code is an HMAC under the key.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

NONCE_BYTES = 32
CODE_BYTES = 32


def fresh_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def code_of(secret: bytes, side: str, *claims: bytes) -> bytes:
    """HMAC of `claims`, each with its length, under the name of one side."""
    code = hmac.new(secret, side.encode(), hashlib.sha256)
    for claim in claims:
        code.update(len(claim).to_bytes(8, "little") + claim)
    return code.digest()


def is_code(given: bytes, secret: bytes, side: str, *claims: bytes) -> bool:
    return hmac.compare_digest(given, code_of(secret, side, *claims))


class Greeting:
    """One side of one handshake. `bound`: what both know of the connection, as a certificate."""

    def __init__(self, key: bytes, magic: bytes = b"", bound: bytes = b""):
        self._key = key
        self._bound = bound
        self._nonce = fresh_nonce()
        self.challenge = magic + self._nonce
        self._claims: tuple[bytes, ...] = ()

    def hello(self, challenge: bytes, claim: bytes = b"") -> bytes:
        """What the side that connects answers."""
        self._claims = (challenge, self._nonce, claim, self._bound)
        return self._nonce + claim + code_of(self._key, "connects", *self._claims)

    def accept(self, hello: bytes) -> bytes | None:
        """The claim of the side that connects; None where it does not know the key."""
        nonce, claim = hello[:NONCE_BYTES], hello[NONCE_BYTES:-CODE_BYTES]
        self._claims = (self.challenge, nonce, claim, self._bound)
        is_known = is_code(hello[-CODE_BYTES:], self._key, "connects", *self._claims)
        return claim if is_known else None

    @property
    def welcome(self) -> bytes:
        """Only after a hello that was accepted."""
        return code_of(self._key, "accepts", *self._claims)

    def is_welcome(self, given: bytes) -> bool:
        """Whether the side that accepts knows the key as well."""
        return is_code(given, self._key, "accepts", *self._claims)

    @property
    def session_key(self) -> bytes:
        """Of this connection alone."""
        return code_of(self._key, "session", *self._claims)
