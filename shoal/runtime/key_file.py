"""The pre-shared key of a user: made once, copied to every host, shown by its fingerprint only."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.errors import BadInput
from shoal.runtime.proof import proof
from shoal.runtime.secret import new_secret, why_not_private

_FINGERPRINT_DIGITS = 16


def make_key_file(path: Path) -> str:
    """Write a new key, which only this user can read; returns its fingerprint."""
    secret = new_secret()
    write_private(path, secret.hex() + "\n")
    return fingerprint(secret)


def fingerprint(secret: bytes) -> str:
    """Tells keys apart, and says nothing about what they are."""
    return proof(secret, "fingerprint").hex()[:_FINGERPRINT_DIGITS]


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
