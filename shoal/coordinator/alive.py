"""The keys by which server processes say that they are there, each bound to its lease."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.coordinator.interface import Conflict, Coordinator
from shoal.runtime.decoders import msgpack_decoder


class Alive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which life of the replica it is, where it listens, and which process it is there.

    Processes of another `host` use `remote` where `address` is a Unix socket. `unreachable` are
    replicas of its shard, by number, to which it has had no connection for a while.
    """

    incarnation: int
    address: str = ""
    pid: int = 0
    remote: str = ""
    host: str = ""
    unreachable: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] = ()


def alive_key(process: int) -> str:
    return f"alive/{process}"


def forget(coordinator: Coordinator, process: int, pid: int) -> bool:
    """Delete the key of a process that has exited: the others need not wait for its lease.

    False where the key is that of another process, which may have taken its place.
    """
    key = alive_key(process)
    found = coordinator.get(key)
    if found is None or not pid:
        return False
    try:
        if msgpack_decoder(Alive).decode(found.value).pid != pid:
            return False
        coordinator.delete_if(key, found.version)
    except (msgspec.MsgspecError, Conflict):
        return False
    return True
