"""How ranks find out which of them can share memory, and become a group."""

from __future__ import annotations

import sys

from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.comm.executors.hierarchical.executor import Hierarchical
from shoal.comm.executors.hierarchical.topology import Topology, host_id
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.transport.shm.memfd import Exchange
from shoal.transport.shm.segment import is_built, join

_said = False


def over_store(store: Store, rank: int, size: int) -> Exchange:
    """Ranks that meet at a torch store."""
    rounds = 0

    def exchange(said: bytes) -> list[bytes]:
        nonlocal rounds
        rounds += 1
        store.set(f"shoal/{rounds}/{rank}", said.decode())
        return [store.get(f"shoal/{rounds}/{peer}") for peer in range(size)]

    return exchange


def share_memory(
    store: Store, rank: int, size: int, timeout_s: float = 1800.0
) -> SharedMemory | Hierarchical | None:
    """An executor that uses shared memory wherever ranks share a host.

    None on all ranks if there is no such host, or, with a word, one where it cannot be. Nobody
    else may use `store`.
    """
    exchange = over_store(store, rank, size)
    topology = Topology.of(exchange(host_id()), rank)
    if len(topology.hosts) == size > 1:
        return None
    inner = _on_host(topology, store, timeout_s)
    answers = exchange(b"no" if inner is None else b"yes")
    if inner is None or b"no" in answers:
        if inner is not None:
            inner.close()
        _say_once(rank)
        return None
    return inner if len(topology.hosts) == 1 else Hierarchical(topology, inner, store, timeout_s)


def _on_host(topology: Topology, store: Store, timeout_s: float) -> SharedMemory | None:
    own = PrefixStore(f"host {topology.host}", store)
    width = len(topology.local)
    segment = join(over_store(own, topology.index, width), topology.index, width, timeout_s)
    return None if segment is None else SharedMemory(segment)


def _say_once(rank: int) -> None:
    global _said
    if rank == 0 and not _said:
        why = "between these ranks" if is_built() else "(Shoal was installed without a compiler)"
        print(f"shoal: no shared memory {why}: they communicate over Gloo", file=sys.stderr)
    _said = True
