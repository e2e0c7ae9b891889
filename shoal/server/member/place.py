"""Which copy of which shard a server is, and its answer where another one is to be asked."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.server.chain import ChainConfig
from shoal.server.chain.node import ChainConsistency
from shoal.server.coordinator import Alive
from shoal.server.protocol import ErrorReply, Moved


@dataclass(frozen=True)
class ChainPlace:
    """process = shard * copies + copy."""

    shard: int
    copy: int
    copies: int
    consistency: ChainConsistency = "strong"

    @property
    def process(self) -> int:
        return self.shard * self.copies + self.copy

    def in_words(self) -> str:
        return f"server {self.process} (shard {self.shard}, replica {self.copy})"


class Elsewhere(Exception):
    """Another copy is to be asked, or this one in the present epoch."""

    def __init__(self, config: ChainConfig, reason: str):
        super().__init__(reason)
        self.moved = Moved(config.epoch, config.head, config.members)

    @property
    def reply(self) -> ErrorReply:
        return ErrorReply(str(self)[:4000], moved=self.moved)


class AddressBook(dict[int, str]):
    """Of the processes of a run, by their number, as far as they have said where they listen."""

    def __init__(self, host: str = ""):
        super().__init__()
        self._host = host

    def saw(self, process: int, alive: Alive) -> None:
        """What alive/<process> holds now."""
        is_of_its_host = alive.address.startswith("unix:") and alive.host != self._host
        address = alive.remote if is_of_its_host else alive.address
        if address:
            self[process] = address


def own_address(local: str, remote: str, host: str, hostname: str) -> Alive:
    """What a server says of itself; `hostname` stands for all addresses of its host."""
    return Alive(0, _named(local, hostname), 0, _named(remote, hostname), host)


def _named(address: str, hostname: str) -> str:
    kind, _, location = address.partition(":")
    host, _, port = location.rpartition(":")
    is_any = kind == "tcp" and host.strip("[]") in ("0.0.0.0", "::")
    return f"tcp:{hostname}:{port}" if is_any and hostname else address
