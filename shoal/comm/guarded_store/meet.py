"""Where the ranks of a run meet: in a service of rank 0 that asks for the key of the run.

    Shoal owns MASTER_PORT      rank 0 listens there itself
    torchrun's agent owns it    rank 0 listens at a port of its own, which the agent's store
                                names, in a value with a proof (comm/authenticated_store.py)

A service stays until its process ends: other ranks may still be on their way, and a script may call
`shoal.run` again.
"""

from __future__ import annotations

import threading
from urllib.parse import urlsplit

from torch.distributed.distributed_c10d import Store

from shoal.comm.guarded_store.client import GuardedStore
from shoal.comm.guarded_store.service import StoreService
from shoal.comm.guarded_store.session import NO_KEY

_LOOPBACK = "127.0.0.1"
_services: dict[tuple[str, int], StoreService] = {}
_starting = threading.Lock()


def meet_at(rendezvous: str, rank: int, secret: bytes | None, is_one_host: bool) -> GuardedStore:
    """The store of all ranks at tcp://HOST:PORT, which rank 0 serves.

    Without a key it is for ranks of one host, and listens at loopback only.
    """
    parts = urlsplit(rendezvous)
    host, port = parts.hostname or "", parts.port or 0
    assert is_one_host or secret
    host = _LOOPBACK if is_one_host else host
    if rank == 0:
        serve(host, port, secret or NO_KEY)
    return GuardedStore(host, port, secret or NO_KEY)


def move_to_own_service(store: Store, rank: int, secret: bytes, host: str) -> GuardedStore:
    """From a store that others can disturb, whose values are proven, to one that they cannot.

    `host`: by which other ranks reach this one, where it is rank 0.
    """
    if rank == 0:
        service = serve(host, 0, secret)
        store.set("service", f"{host} {service.port}")
    address, _, port = store.get("service").decode().partition(" ")
    return GuardedStore(address, int(port), secret)


def serve(host: str, port: int, secret: bytes) -> StoreService:
    """The service of this process at this address; port 0: at any one."""
    with _starting:
        if (host, port) not in _services:
            _services[host, port] = StoreService(host, port, secret)
        return _services[host, port]
