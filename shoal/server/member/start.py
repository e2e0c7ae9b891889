"""A server as one copy of its shard: the parts that take part in the chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shoal.coordinator.interface import Coordinator
from shoal.protocol.endpoint import PLAIN
from shoal.protocol.frames import FrameKind, Header
from shoal.runtime.config import TlsConfig
from shoal.server.member.duties import Keeper, Leading
from shoal.server.member.peer_link import PeerLink
from shoal.server.member.place import AddressBook, ChainPlace, own_address
from shoal.server.member.runtime import ChainRuntime
from shoal.server.process.model_host import ModelHost


@dataclass(frozen=True)
class ChainSettings:
    """Where the copies of the shard listen (else the coordinator says it), and who they are."""

    place: ChainPlace
    addresses: Sequence[str]
    coordinator: Coordinator
    ttl_s: float
    leaders: Sequence[str] = ()  # the copies of shard 0; default: this is shard 0
    leases: Coordinator | None = None  # the same coordinator over another connection
    host: str = ""  # what tells this host from others
    hostname: str = ""  # by which others reach it

    def book(self) -> AddressBook:
        first = self.place.shard * self.place.copies
        known = dict(enumerate(self.leaders))
        known |= {first + replica: address for replica, address in enumerate(self.addresses)}
        return AddressBook(self.host, known)


class ChainParts:
    """The chain, its links and its keeper, of one server."""

    def __init__(
        self,
        settings: ChainSettings,
        host: ModelHost,
        secret: bytes,
        on_reset: Callable[[], None],
        listens: tuple[str, str],
        tls: TlsConfig = PLAIN,
    ):
        """It `listens` at these two addresses; the second, for other hosts, may be empty."""
        place = settings.place
        # the first optimizer of a process loads modules for seconds: before others wait for it
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0).step()
        self.runtime = ChainRuntime(place, host, on_reset)
        header = Header(FrameKind.HELLO, place.copy, place.shard)
        book = settings.book()
        first = place.shard * place.copies
        self.runtime.links = {
            peer: PeerLink(self.runtime, peer, partial(book.of, first + peer), secret, header, tls)
            for peer in range(place.copies)
            if peer != place.copy
        }
        self.leading = Leading(self.runtime, book.of, secret, tls)
        own = own_address(*listens, settings.host, settings.hostname)
        coordinator = settings.coordinator
        leases = settings.leases or coordinator
        self.keeper = Keeper(self.runtime, coordinator, leases, settings.ttl_s, own, book)

    def start(self) -> None:
        """Once the server listens."""
        for link in self.runtime.links.values():
            link.start()
        self.keeper.start()
        self.leading.start()

    def close(self, join_s: float) -> None:
        self.keeper.close(join_s)
        self.runtime.close(join_s)
        self.leading.close(join_s)
