"""A torch store of one rank whose keys and values are in the service of rank 0."""

from __future__ import annotations

import threading
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from shoal.comm.store import session
from shoal.comm.store.authenticated import RendezvousStore
from shoal.comm.store.service import StoreService


class GuardedStore(Store):
    """Keep a reference: torch does not.

    A call that waits has a connection to itself, so that others of this process go on.
    """

    timeout: timedelta  # of torch's

    def __init__(self, host: str, port: int, secret: bytes, timeout_s: float = 1800.0):
        """Connects; as long as no service listens there, it is tried again."""
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._address = (host, port)
        self._secret = secret
        self._lock = threading.Lock()
        self._clones: list[Store] = []
        self._free = [session.connect(self._address, secret, timeout_s)]

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._ask("get", [key]).value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, limit=timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys).number)

    def add(self, key: str, value: int) -> int:
        return self._ask("add", [key], number=value).number

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]).number)

    def clone(self) -> Store:
        seconds = self.timeout.total_seconds()
        self._clones.append(GuardedStore(*self._address, self._secret, seconds))
        return self._clones[-1]

    def close(self) -> None:
        with self._lock:
            links = self._free
            self._free = []
        for link in links:
            link.close()

    def _ask(
        self,
        operation: session.Operation,
        keys: list[str],
        value: bytes = b"",
        number: int = 0,
        limit: timedelta | None = None,
    ) -> session.StoreReply:
        limit_s = (limit or self.timeout).total_seconds()
        link = self._take()
        try:
            reply = link.ask(session.StoreRequest(operation, keys, value, number), limit_s)
        except BaseException as error:  # an answer would come to the next request
            link.close()
            if not isinstance(error, OSError | session.BadFrame):
                raise
            why = f"the connection was closed: {error}"
            if isinstance(error, TimeoutError):
                why = f"timed out waiting {limit_s:g} s for {', '.join(keys)}"
            raise DistStoreError(f"the rendezvous at {self._name}: {why}") from error
        with self._lock:
            self._free.append(link)
        if reply.refusal:
            raise DistStoreError(f"the rendezvous at {self._name}: {reply.refusal}")
        return reply

    def _take(self) -> session.StoreLink:
        with self._lock:
            if self._free:
                return self._free.pop()
        return session.connect(self._address, self._secret, self.timeout.total_seconds())

    @property
    def _name(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"


_LOOPBACK = "127.0.0.1"
_services: dict[tuple[str, int], StoreService] = {}
_starting = threading.Lock()


def meet_at(rendezvous: str, rank: int, secret: bytes, is_one_host: bool) -> GuardedStore:
    """The store of all ranks at tcp://HOST:PORT, which rank 0 serves; at loopback on one host."""
    parts = urlsplit(rendezvous)
    host = parts.hostname or ""
    port = parts.port or 0
    host = _LOOPBACK if is_one_host else host
    if rank == 0:
        serve(host, port, secret)
    return GuardedStore(host, port, secret)


def move_to_own_service(
    store: RendezvousStore, name: str, rank: int, secret: bytes, host: str
) -> GuardedStore:
    """From a store that others can disturb, whose values are proven, to one that they cannot.

    `name` is that of this start; `host`: by which other ranks reach this one, where it is rank 0.
    """
    if rank == 0:
        store.set(f"service/{name}", f"{host} {serve(host, 0, secret).port}")
    address, _, port = store.get(f"service/{name}").decode().partition(" ")
    return GuardedStore(address, int(port), secret)


def serve(host: str, port: int, secret: bytes) -> StoreService:
    """The service of this process at this address; port 0: at any one."""
    with _starting:
        if (host, port) not in _services:
            _services[host, port] = StoreService(host, port, secret)
        return _services[host, port]
