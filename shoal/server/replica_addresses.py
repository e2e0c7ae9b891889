"""Where the replicas of a shard listen, as a worker reaches them.

A replica that is started again on another host listens elsewhere. Each says at the coordinator
where it is; a worker that cannot reach one asks there, in the background.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import overload

import msgspec

from shoal.coordinator.alive import Alive, alive_key
from shoal.coordinator.connect import open_coordinator
from shoal.coordinator.interface import CoordinatorError
from shoal.runtime.config import RunConfig
from shoal.runtime.decoders import msgpack_decoder


class ReplicaAddresses(Sequence[str]):
    """By number of the replica; `first` is the number of the first one among all servers."""

    def __init__(self, addresses: Sequence[str], first: int = 0, config: RunConfig | None = None):
        """Without a `config` that names a coordinator they stay as they are."""
        self._addresses = list(addresses)
        self._first = first
        may_move = any(address.startswith("tcp:") for address in addresses)
        has_coordinator = config is not None and config.coordinator is not None
        self._config = config if may_move and has_coordinator else None
        self._asking = threading.Lock()

    def __len__(self) -> int:
        return len(self._addresses)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._addresses[index]

    def look_again(self) -> None:
        """One of them does not answer."""
        if self._config is not None and self._asking.acquire(blocking=False):
            thread = threading.Thread(target=self._ask, name="shoal-ps-addresses", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends
                self._asking.release()

    def _ask(self) -> None:
        assert self._config is not None
        try:
            with (
                suppress(CoordinatorError, OSError),
                closing(open_coordinator(self._config, "a worker")) as coordinator,
            ):
                for replica in range(len(self._addresses)):
                    found = coordinator.get(alive_key(self._first + replica))
                    if found is not None:
                        self._saw(replica, found.value)
        finally:
            self._asking.release()

    def _saw(self, replica: int, value: bytes) -> None:
        with suppress(msgspec.MsgspecError):
            alive = msgpack_decoder(Alive).decode(value)
            address = alive.remote or alive.address
            if address.startswith("tcp:"):  # a Unix socket is for its host alone
                self._addresses[replica] = address
