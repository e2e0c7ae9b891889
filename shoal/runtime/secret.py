"""The secret of a run, which its processes prove to each other, and the files that hold it."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import stat
import time
from pathlib import Path

from shoal.errors import BadInput, ShoalError
from shoal.runtime.files import open_file

NONCE_BYTES = 32
CODE_BYTES = 32
REFUSED = bytes(CODE_BYTES)  # instead of a welcome


class Stranger(ShoalError):
    """The other side of a connection has not proven the key."""


def receive(sock: socket.socket, count: int, deadline_s: float | None = None) -> bytes:
    """So many bytes, before the deadline altogether: single bytes now and then do not help."""
    data = bytearray()
    while len(data) < count:
        if deadline_s is not None:
            sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the other side has ended")
        data += part
    return bytes(data)


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
    """One side of one handshake: both prove that they know a key, which itself never travels.

    who accepts  -> challenge    magic, nonce
    who connects -> hello        nonce, claim (who it is), code
    who accepts  -> welcome      code over the same, under another name

    Nonces are fresh, so a recorded handshake cannot be replayed. The claim is part of the codes,
    so one connection cannot pass for another. A code is an HMAC under the key. `bound`: what both
    know of the connection, as a certificate.
    """

    def __init__(self, key: bytes, magic: bytes = b"", bound: bytes = b""):
        self._key = key
        self._bound = bound
        self._magic = magic
        self._nonce = fresh_nonce()
        self.challenge = magic + self._nonce
        self._claims: tuple[bytes, ...] = ()

    def connect(self, sock: socket.socket, claim: bytes = b"", limit_s: float = 10.0) -> None:
        """The handshake of the side that connects; Stranger if the other one proves no key."""
        deadline_s = time.monotonic() + limit_s
        challenge = receive(sock, len(self.challenge), deadline_s)
        if not challenge.startswith(self._magic):
            raise Stranger("the other side is not a process of Shoal that listens for this")
        sock.sendall(self.hello(challenge, claim))
        welcome = receive(sock, CODE_BYTES, deadline_s)
        if welcome == REFUSED:
            raise Stranger("it has another key, or none")
        if not self.is_welcome(welcome):
            raise Stranger("it does not know the key of this run")

    def admit(self, sock: socket.socket, claim_bytes: int = 0, limit_s: float = 10.0) -> bytes:
        """The handshake of the side that accepts: the claim of the other; the welcome is left."""
        deadline_s = time.monotonic() + limit_s
        sock.settimeout(limit_s)
        sock.sendall(self.challenge)
        claim = self.accept(receive(sock, NONCE_BYTES + claim_bytes + CODE_BYTES, deadline_s))
        if claim is None:
            sock.sendall(REFUSED)
            raise Stranger("the other side does not know the key of this run")
        return claim

    def hello(self, challenge: bytes, claim: bytes = b"") -> bytes:
        """What the side that connects answers."""
        self._claims = (challenge, self._nonce, claim, self._bound)
        return self._nonce + claim + code_of(self._key, "connects", *self._claims)

    def accept(self, hello: bytes) -> bytes | None:
        """The claim of the side that connects; None where it does not know the key."""
        nonce = hello[:NONCE_BYTES]
        claim = hello[NONCE_BYTES:-CODE_BYTES]
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


SECRET_BYTES = 32
_SHORTEST_SECRET_BYTES = 16
_MAX_SECRET_TEXT = 4096


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def read_secret_file(path: Path) -> bytes:
    """BadInput if it cannot be read, or if other users could read or have written it."""
    try:
        with open(open_file(path), "rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(_MAX_SECRET_TEXT).decode("ascii", errors="replace")
    except OSError as error:
        raise BadInput(f"{path}, which holds the secret of the run: {error.strerror}") from error
    if why := why_not_private(path, status):
        raise BadInput(f"{path} holds the secret of the run, and {why}")
    return parse_secret(text.strip(), str(path))


def why_not_private(path: Path, status: os.stat_result) -> str | None:
    """What is wrong with who may use a file that holds a secret; None if nothing is."""
    if status.st_uid not in (os.getuid(), 0):
        return "it belongs to another user"
    if stat.S_IMODE(status.st_mode) & 0o077:
        return f"other users can read it: chmod 600 {path}"
    return None


def parse_secret(text: str, source: str) -> bytes:
    """The secret that `source` holds in hexadecimal."""
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) < _SHORTEST_SECRET_BYTES:
        raise BadInput(f"{source} has to hold a secret of at least 32 hexadecimal digits")
    return secret


_FINGERPRINT_DIGITS = 16


def make_key_file(path: Path) -> str:
    """Write a new key, which only this user can read; returns its fingerprint."""
    secret = new_secret()
    write_private(path, secret.hex() + "\n")
    return fingerprint(secret)


def fingerprint(secret: bytes) -> str:
    """Tells keys apart, and says nothing about what they are."""
    return code_of(secret, "fingerprint").hex()[:_FINGERPRINT_DIGITS]


def write_private(path: Path, text: str) -> None:
    """A new file of mode 0600; BadInput where there is one, or where it cannot be written."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise BadInput(f"{path} is there already: remove it first, or name another file") from error
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from error
    with os.fdopen(handle, "w", encoding="ascii") as file:
        os.fchmod(handle, 0o600)  # whatever the umask
        file.write(text)


def mode_warning(path: Path) -> str | None:
    """What is wrong with who may use a file that holds a secret; None if nothing is."""
    try:
        status = path.stat()
    except OSError as error:
        return f"{path}: {error.strerror}"
    why = why_not_private(path, status)
    return f"{path} holds a secret, and {why}" if why else None
