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
from shoal.server.member.keeper import Keeper
from shoal.server.member.leading import Leading
from shoal.server.member.peer_link import PeerLink
from shoal.server.member.place import AddressBook, ChainPlace, OwnAddress
from shoal.server.member.runtime import ChainRuntime
from shoal.server.process.model_host import ModelHost


@dataclass(frozen=True)
class ChainSettings:
    """Where the copies of the shard listen, by their number, and what they agree through.

    Without `addresses` the coordinator says where the others listen.
    """

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


def _load_optimizers() -> None:
    """The first optimizer of a process loads modules for seconds: before others wait for it."""
    p = torch.nn.Parameter(torch.zeros(1))
    torch.optim.SGD([p], lr=0.0).step()


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
        _load_optimizers()
        self.runtime = ChainRuntime(place, host, on_reset)
        host.chain = self.runtime
        header = Header(FrameKind.HELLO, place.copy, place.shard)
        book = settings.book()
        first = place.shard * place.copies
        self._links = {
            peer: PeerLink(self.runtime, peer, partial(book.of, first + peer), secret, header, tls)
            for peer in range(place.copies)
            if peer != place.copy
        }
        self.leading = Leading(self.runtime, book.of, secret, tls)
        own = OwnAddress.of(*listens, settings.host, settings.hostname)
        agreed = (
            settings.coordinator,
            settings.ttl_s,
            own,
            book,
            settings.leases,
            self._unreachable,
        )
        self.keeper = Keeper(self.runtime, *agreed)

    def _unreachable(self, seconds: float) -> tuple[int, ...]:
        return tuple(peer for peer, link in self._links.items() if link.down_s > seconds)

    def start(self) -> None:
        """Once the server listens."""
        self.runtime.start(self._links)
        self.keeper.start()
        self.leading.start()

    def close(self, join_s: float) -> None:
        self.keeper.close(join_s)
        self.runtime.close(join_s)
        self.leading.close(join_s)
