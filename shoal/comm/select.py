"""Which executor the ranks of a run get.

named algorithm          schedules over TCP between hosts, or torch's point-to-point messages
GPUs, one each           NCCL, and for the host's memory what ranks without GPUs get:
one host                 shared memory
several hosts            shared memory inside, TCP between
no native part           Gloo, on one host
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shoal.comm import network as networks
from shoal.comm.executor import Executor
from shoal.comm.executors.hierarchical.topology import Topology
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.executors.torch import Torch
from shoal.comm.group import Group
from shoal.comm.store.authenticated import generation_name, own_generation
from shoal.comm.transport.shm.memfd import Exchange
from shoal.comm.transport.shm.segment import NOT_BUILT, is_built
from shoal.comm.transport.transport import Transport
from shoal.errors import BadInput
from shoal.runtime.config import RunConfig, gloo_settings, no_watchdog
from shoal.schedules.user import is_user_function

if TYPE_CHECKING:
    from shoal.comm.executors.hierarchical.executor import Hierarchical
    from shoal.comm.executors.scheduled import Algorithm

DEFAULT_TIMEOUT_S = 1800.0
_has_warned = False


@dataclass(frozen=True)
class GroupSpec:
    """The ranks of a run, and what decides how they communicate."""

    rank: int
    size: int
    init_method: str  # of torch.distributed.init_process_group
    backend: str  # "gloo" or "nccl"
    name: str  # tells the runs of one process apart
    algorithm: str | None = None  # the all-reduce that was asked for by name
    replicas: int = 1  # how many of them agree by it
    timeout_s: float = DEFAULT_TIMEOUT_S  # how long an operation waits for the other ranks
    secret: bytes | None = field(default=None, repr=False)  # proves what is in the store
    is_one_host: bool = False  # all ranks are: nothing then listens beyond loopback
    config: RunConfig = field(default_factory=RunConfig, repr=False)  # how hosts reach each other
    store: Store | None = field(default=None, repr=False)  # in which ranks have met already
    notices_losses: bool = False  # of ranks, and ends then: the watchdog of torch need not

    @property
    def owns_rendezvous(self) -> bool:
        """Whether ranks meet in a service of rank 0, which is not torch's.

        A network that is trusted and has no key, and NCCL, whose threads call stores from C++ until
        the end of the process, take torch's.
        """
        is_ours = self.backend == "gloo" and self.init_method.startswith("tcp://")
        return is_ours and self.secret is not None

    @property
    def network(self) -> networks.HostNetwork:
        """The host of the rendezvous is one that all ranks reach."""
        master = self.config.environ.get("MASTER_ADDR")
        if self.init_method.startswith("tcp://"):
            master = urlsplit(self.init_method).hostname
        return networks.HostNetwork(self.config, self.is_one_host, master)


@contextmanager
def open_group(spec: GroupSpec) -> Iterator[Group]:
    """A group of all ranks; all of them have joined when the block begins."""
    is_ours = not dist.is_initialized()
    stores: list[Store] = []  # torch does not keep a store that is written in Python
    is_unused = is_ours and not spec.is_one_host and spec.backend == "gloo"
    with gloo_settings(spec.is_one_host, is_unused):
        if is_ours:
            _join_world(spec, stores)
        world = dist.group.WORLD
        assert world is not None
        if is_ours and spec.timeout_s != DEFAULT_TIMEOUT_S:  # not of ranks that start slowly
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=spec.timeout_s), world)
        group = Group(_open_executor(spec, world))
        try:
            yield group
        except BaseException:
            if is_ours and spec.backend == "nccl":  # its end would wait for what is under way
                dist.distributed_c10d._abort_process_group()
                is_ours = False
            raise
        finally:
            group.close()
            if is_ours:
                dist.destroy_process_group()


def _join_world(spec: GroupSpec, kept: list[Store]) -> None:
    """Make the default process group of this process.

    A process may join several worlds one after the other at the same rendezvous: names keep what
    they leave in its store apart.
    """
    if spec.store is not None:
        store = spec.store
    elif spec.owns_rendezvous:
        from shoal.comm.store.client import meet_at

        assert spec.secret is not None
        store = meet_at(spec.init_method, spec.rank, spec.secret, spec.is_one_host)
        kept.append(store)
    else:
        store = next(rendezvous(spec.init_method, spec.rank, spec.size))[0]
    named = PrefixStore(spec.name, store)
    if spec.notices_losses and is_built():
        no_watchdog()
    if spec.owns_rendezvous or spec.backend != "gloo" or spec.init_method.startswith("file:"):
        own = own_generation(named, spec.rank, spec.size)
    else:
        own = _meet_openly(spec, named, kept)
    dist.init_process_group(
        spec.backend,
        store=own,
        rank=spec.rank,
        world_size=spec.size,
    )


def _meet_openly(spec: GroupSpec, store: Store, kept: list[Store]) -> Store:
    """The store of these ranks, once all have met in one of torch's that strangers can write to."""
    from shoal.comm.store.authenticated import RendezvousStore, check_secrets, heeding_refusals
    from shoal.comm.store.client import move_to_own_service

    rank = spec.rank
    size = spec.size
    secret = spec.secret
    with heeding_refusals(store, rank) as refusals:
        check_secrets(RendezvousStore(store, rank, None, refusals), secret is not None, rank, size)
        proven = RendezvousStore(store, rank, secret, refusals)
        name = generation_name(proven, rank, size)
        if secret is None:
            return PrefixStore(name, store)
        given = spec.config.hostname or spec.config.environ.get("MASTER_ADDR")  # torchrun
        host = networks.LOOPBACK if spec.is_one_host else given or spec.network.address
        own = move_to_own_service(proven, name, rank, secret, host)
        kept.append(own)
        named = PrefixStore(spec.name, own)
        here = RendezvousStore(named, rank, None, refusals)
        return PrefixStore(generation_name(here, rank, size), named)


def shared_store(name: str, rank: int, size: int) -> Store:
    """A part of the store of the open group, for one use; all ranks call it."""
    world = dist.group.WORLD
    assert world is not None
    return own_generation(PrefixStore(name, world.get_group_store()), rank, size)


def _open_executor(spec: GroupSpec, world: dist.ProcessGroup) -> Executor:
    """Ranks of one host go through its memory, except by a named algorithm; GPUs by NCCL."""
    if spec.algorithm is not None:
        return _by_algorithm(spec, spec.algorithm, world)
    store = shared_store(f"memory of {spec.name}", spec.rank, spec.size)
    host: Executor | None = share_memory(store, spec.rank, spec.size, spec.timeout_s, spec.network)
    if spec.backend == "gloo":
        return host or Torch(world)
    from shoal.comm.executors.nccl import Nccl

    return Nccl(world, host or Torch(dist.new_group(backend="gloo")))


def _by_algorithm(spec: GroupSpec, name: str, world: dist.ProcessGroup) -> Executor:
    transport, order = _between_all(spec, world)

    from shoal.comm.executors.scheduled import ForRanks, Ordered, Scheduled

    algorithm: Algorithm = Ordered(name, order)
    if is_user_function(name):  # it is made and proven for the replicas
        algorithm = ForRanks(name, spec.replicas)
    return Scheduled(transport, {"all_reduce": algorithm}, background=True)


def _between_all(spec: GroupSpec, world: dist.ProcessGroup) -> tuple[Transport, tuple[int, ...]]:
    """Messages between all pairs of ranks, and their order in a ring: hosts, and racks, in turn."""
    from shoal.comm.transport.tcp.transport import TcpTransport
    from shoal.comm.transport.transport import TorchTransport

    if spec.is_one_host:
        return TorchTransport(world), tuple(range(spec.size))
    spec.network.require_native()
    common = PrefixStore(f"transport of {spec.name}", world.get_group_store())
    exchange = exchange_over(own_generation(common, spec.rank, spec.size), spec.rank, spec.size)
    placed = networks.hosts_of(spec.network, exchange, spec.rank)
    order = tuple(rank for ranks in placed.hosts for rank in ranks)
    topology = Topology(tuple((rank,) for rank in range(spec.size)), spec.rank)
    engine = networks.open_engine(topology, exchange, spec.timeout_s, spec.network)
    return TcpTransport(engine, timeout_s=spec.timeout_s), order


# ---------------------------------------------------------------------- shared memory


def exchange_over(store: Store, rank: int, size: int) -> Exchange:
    """An all-gather of bytes through a torch store."""
    rounds = 0

    def exchange(message: bytes) -> list[bytes]:
        nonlocal rounds
        rounds += 1
        store.set(f"shoal/{rounds}/{rank}", message.decode())
        return [store.get(f"shoal/{rounds}/{peer}") for peer in range(size)]

    return exchange


def share_memory(
    store: Store,
    rank: int,
    size: int,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    network: networks.HostNetwork | None = None,
) -> SharedMemory | Hierarchical | None:
    """An executor that uses shared memory wherever ranks share a host.

    None on all ranks of one host, with a warning, if one of them cannot: Gloo joins them then.
    `store` must have no other users.
    """
    network = network or networks.HostNetwork()
    exchange = exchange_over(store, rank, size)
    topology = networks.hosts_of(network, exchange, rank)
    local = networks.share_on_hosts(topology, exchange, timeout_s, network.config.run_dir)
    if local is None:
        if len(topology.hosts) > 1:
            network.require_native()
            raise BadInput(
                f"rank {rank}: each of several hosts needs the native part and memory that its "
                "ranks share: look at what the other ranks say"
            )
        _warn_once(rank)
        return None
    return networks.join_hosts(topology, local, exchange, timeout_s, network)


def _warn_once(rank: int) -> None:
    global _has_warned
    if rank == 0 and not _has_warned:
        why = "between these ranks" if is_built() else f"({NOT_BUILT})"
        print(f"shoal: no shared memory {why}: they communicate over Gloo", file=sys.stderr)
    _has_warned = True
