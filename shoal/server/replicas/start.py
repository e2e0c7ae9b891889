"""A server as one replica of its shard: the parts that take part in the chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shoal.coordinator.interface import Coordinator
from shoal.runtime.config import TlsConfig
from shoal.server.model_host import ModelHost
from shoal.server.protocol.endpoint import PLAIN
from shoal.server.protocol.frames import FrameKind, Header
from shoal.server.replicas.keeper import Keeper
from shoal.server.replicas.leading import Leading
from shoal.server.replicas.peer_link import PeerLink
from shoal.server.replicas.runtime import ChainRuntime, ReplicaPlace
from shoal.server.replicas.streams import StreamFollowers


@dataclass(frozen=True)
class ReplicaSettings:
    """Where the replicas of the shard listen, by their number, and what they agree through."""

    place: ReplicaPlace
    addresses: Sequence[str]
    coordinator: Coordinator
    ttl_s: float
    leaders: Sequence[str] = ()  # the replicas of shard 0; default: this is shard 0
    leases: Coordinator | None = None  # the same coordinator over another connection


def _load_optimizers() -> None:
    """The first optimizer of a process loads modules for seconds: before others wait for it."""
    p = torch.nn.Parameter(torch.zeros(1))
    torch.optim.SGD([p], lr=0.0).step()


class ReplicaParts:
    """The chain, its links and its keeper, of one server."""

    def __init__(
        self,
        settings: ReplicaSettings,
        host: ModelHost,
        secret: bytes,
        on_reset: Callable[[], None],
        tls: TlsConfig = PLAIN,
    ):
        place = settings.place
        _load_optimizers()
        self.runtime = ChainRuntime(place, host, on_reset)
        host.chain = self.runtime
        host.make_followers = StreamFollowers
        header = Header(FrameKind.HELLO, place.replica, place.shard)
        self._links = {
            peer: PeerLink(self.runtime, peer, partial(str, address), secret, header, tls)
            for peer, address in enumerate(settings.addresses)
            if peer != place.replica
        }
        leaders = settings.leaders or settings.addresses
        self.leading = Leading(self.runtime, leaders, secret, tls)
        own = settings.addresses[place.replica]
        agreed = (settings.coordinator, settings.ttl_s, own, settings.leases)
        self.keeper = Keeper(self.runtime, *agreed)

    def start(self) -> None:
        """Once the server listens."""
        self.runtime.start(self._links)
        self.keeper.start()
        self.leading.start()

    def close(self, join_s: float) -> None:
        self.keeper.close(join_s)
        self.runtime.close(join_s)
        self.leading.close(join_s)
