"""Both sides prove that they know the run's secret before any other frame counts.

    server -> worker   CHALLENGE  server's nonce
    worker -> server   HELLO      worker's nonce, who it is, HMAC over all of it
    server -> worker   WELCOME    HMAC over the same, with the server's name for it

Nonces are fresh, so that what was heard once opens nothing later. The secret itself never
travels: the launcher makes it and hands it over in a file of mode 0600, or in the environment.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from shoal.errors import BadInput

SECRET_BYTES = 32
NONCE_BYTES = 32
FILE = "secret"


def fresh_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def fresh_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, side: str, *said: bytes) -> bytes:
    """What only a holder of the secret can say about `said`; each part counts with its length."""
    code = hmac.new(secret, side.encode(), hashlib.sha256)
    for part in said:
        code.update(len(part).to_bytes(8, "little") + part)
    return code.digest()


def is_proof(given: bytes, secret: bytes, side: str, *said: bytes) -> bool:
    return hmac.compare_digest(given, proof(secret, side, *said))


def read_secret(environ: Mapping[str, str]) -> bytes | None:
    """The secret of this run, from its directory or the environment; None where there is none."""
    folder = environ.get("SHOAL_RUN_DIR")
    file = Path(folder, FILE) if folder else None
    if file is not None and file.is_file():
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise BadInput(f"{file} holds the run's secret and others may read it: chmod 600 it")
        return _checked(file.read_text().strip(), str(file))
    text = environ.get("SHOAL_SECRET")
    return _checked(text, "SHOAL_SECRET") if text else None


def write_secret(folder: Path, secret: bytes) -> None:
    """Leave it where only this user can read it."""
    handle = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secret.hex())


def _checked(text: str, where: str) -> bytes:
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) < 16:
        raise BadInput(f"{where} has to hold a secret of at least 32 hexadecimal digits")
    return secret
