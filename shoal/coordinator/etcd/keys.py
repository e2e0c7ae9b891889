"""Names of a run's keys in etcd, which other runs share: shoal/RUN/k/KEY, shoal/RUN/r/CLIENT."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def end_of(prefix: bytes) -> bytes:
    """The first key after all that begin with this prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


@dataclass(frozen=True)
class RunKeys:
    """`run` is the same for all processes of a run, and for no other run."""

    run: str

    @classmethod
    def of_secret(cls, secret: bytes) -> RunKeys:
        return cls(hashlib.sha256(b"shoal run in etcd" + secret).hexdigest()[:32])

    @property
    def everything(self) -> dict[str, str]:
        prefix = f"shoal/{self.run}/".encode()
        return {"key": text_of(prefix), "range_end": text_of(end_of(prefix))}

    def key(self, key: str) -> bytes:
        return f"shoal/{self.run}/k/{key}".encode()

    def marker(self, client: str) -> bytes:
        """Holds the number of the latest change that a client has made."""
        return f"shoal/{self.run}/r/{client}".encode()

    def name_of(self, key: bytes) -> str:
        return key.decode(errors="replace").removeprefix(f"shoal/{self.run}/k/")

    def selection(self, name: str) -> dict[str, str]:
        """A key, or a range of keys where the name stands for all that begin with it."""
        key = self.key(name)
        if name and not name.endswith("/"):
            return {"key": text_of(key)}
        return {"key": text_of(key), "range_end": text_of(end_of(key))}
