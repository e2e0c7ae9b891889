"""How SHOAL_SERVERS names a server: an address, or two where its host has one of its own.

tcp:10.0.0.2:7001
tcp:10.0.0.2:7001|unix:/tmp/shoal-ps-1234/server-0.sock|HOST      HOST as in SHOAL_HOST_ID
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import BadInput


@dataclass(frozen=True)
class LaunchedServer:
    """A server that a launcher has started."""

    remote: str  # where it listens
    local: str = ""  # a socket for workers of its own host
    host: str = ""  # that host

    def encode(self) -> str:
        return "|".join((self.remote, self.local, self.host)) if self.local else self.remote

    @classmethod
    def decode(cls, text: str) -> LaunchedServer:
        words = text.split("|")
        if len(words) not in (1, 3) or not all(words):
            raise BadInput(f"SHOAL_SERVERS has {text!r}: use ADDRESS or ADDRESS|SOCKET|HOST")
        return cls(*words)
