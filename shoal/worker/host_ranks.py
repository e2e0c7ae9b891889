"""Which ranks share a host, where RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are all there is.

Each rank writes into the store of the rendezvous where it is, and reads the same of all others:

    rank 0   host a              LOCAL_RANK 0, LOCAL_WORLD_SIZE 3
    rank 1   host a              LOCAL_RANK 1
    rank 2   host b              LOCAL_RANK 0, LOCAL_WORLD_SIZE 1
    rank 3   host a              LOCAL_RANK 2

A host is what `host_id` says: ranks that reach each other by memory and by loopback. A variable
that is set counts more than what follows from hosts; variables that contradict each other do not.

Each rank also writes which GPUs it sees: two agents of torchrun on one host give their ranks the
same LOCAL_RANK, hence the same GPU, and Slurm may show each task a GPU of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shoal.comm.executors.hierarchical.topology import Topology, host_id
from shoal.comm.select import exchange_over, shared_store
from shoal.comm.store.authenticated import own_generation
from shoal.comm.store.client import meet_at
from shoal.comm.transport.cuda_ipc import device_name
from shoal.errors import BadInput, ShoalError
from shoal.runtime.config import RunConfig
from shoal.runtime.decoders import decode_json
from shoal.runtime.trust import require_protected
from shoal.runtime.variable_text import parse_count
from shoal.worker.environment import LOCAL_NAMES, Placement


class RankHost(msgspec.Struct, frozen=True):
    """What one rank says: its host, what its variables say, and the GPUs that it may take."""

    host: str
    local_rank: int | None
    local_size: int | None
    gpus: tuple[str, ...]

    @classmethod
    def parse(cls, written: bytes, rank: int) -> RankHost:
        try:
            return decode_json(written, cls)
        except ValueError:
            raise ShoalError(
                f"what rank {rank} wrote into the store of the rendezvous was overwritten by "
                "another process, or it runs another version of Shoal"
            ) from None


# ---------------------------------------------------------------------- meeting


def meet(placement: Placement, config: RunConfig, is_cuda: bool) -> Store | None:
    """The store of these ranks; None where the script has made a process group already."""
    if dist.is_initialized():
        return None
    if placement.rendezvous == "env://":  # of torchrun's agents; the key is proven in it later
        return _torch_store(placement)
    host = config.environ.get("MASTER_ADDR")
    what = f"the rendezvous at MASTER_ADDR={host} (localhost where all ranks are on one host)"
    secret = require_protected(config, what, placement.rank == 0)
    if secret is None or (is_cuda and config.tls.trusted_network):  # NCCL: see GroupSpec
        return _torch_store(placement)
    return meet_at(placement.rendezvous, placement.rank, secret, is_one_host=False)


def _torch_store(placement: Placement) -> Store:
    store: Store = next(rendezvous(placement.rendezvous, placement.rank, placement.size))[0]
    return store


def ask_hosts(
    placement: Placement,
    config: RunConfig,
    number: int,
    store: Store | None,
    gpus: Sequence[torch.device] = (),
) -> Placement:
    """The placement of this rank, when all ranks have said where they are; all ranks call it."""
    rank = placement.rank
    size = placement.size
    name = f"hosts of run {number}"
    if store is None:
        own = shared_store(name, rank, size)
    else:
        own = own_generation(PrefixStore(name, store), rank, size)
    rank_text, size_text = (config.environ.get(variable) for variable in LOCAL_NAMES)
    here = RankHost(
        host_id(config.host_id).decode(),
        parse_count(LOCAL_NAMES[0], rank_text, 0) if rank_text else None,
        parse_count(LOCAL_NAMES[1], size_text, 1) if size_text else None,
        tuple(map(device_name, gpus)),
    )
    said = exchange_over(own, rank, size)(msgspec.json.encode(here))
    hosts = [RankHost.parse(sentence, peer) for peer, sentence in enumerate(said)]
    return place(placement, hosts)


# ---------------------------------------------------------------------- who is where


def place(placement: Placement, hosts: Sequence[RankHost]) -> Placement:
    """LOCAL_RANK and LOCAL_WORLD_SIZE of this rank; BadInput where variables contradict."""
    rank_name, size_name = LOCAL_NAMES
    _check_given_by_all(rank_name, [host.local_rank for host in hosts])
    _check_given_by_all(size_name, [host.local_size for host in hosts])
    topologies = [Topology.of([host.host.encode() for host in hosts], r) for r in range(len(hosts))]
    found = [_local(host, topology) for host, topology in zip(hosts, topologies, strict=True)]
    taken = {  # where each rank has one, and no two compute on the same: as many as ranks
        (host.host, host.gpus[local_rank % len(host.gpus)])
        for host, (local_rank, _) in zip(hosts, found, strict=True)
        if host.gpus
    }
    own_rank, own_size = found[placement.rank]
    own = replace(placement, local_rank=own_rank, local_size=own_size)
    return replace(own, knows_hosts=True, has_gpu_each=len(taken) == len(hosts))


def _local(said: RankHost, topology: Topology) -> tuple[int, int]:
    local_rank = topology.index if said.local_rank is None else said.local_rank
    local_size = len(topology.local) if said.local_size is None else said.local_size
    if local_rank >= local_size:
        rank_name, size_name = LOCAL_NAMES
        where = f"{len(topology.local)} of the {topology.size} ranks are on its host"
        raise BadInput(
            f"rank {topology.rank} has {rank_name} {local_rank} and {size_name} {local_size}, and "
            f"{where}: correct the variables, or leave out both"
        )
    return local_rank, local_size


def _check_given_by_all(name: str, values: Sequence[int | None]) -> None:
    lacking = [rank for rank, value in enumerate(values) if value is None]
    if lacking and len(lacking) < len(values):
        given = next(rank for rank, value in enumerate(values) if value is not None)
        raise BadInput(
            f"rank {given} has {name}={values[given]}, and rank {lacking[0]} has no {name}: set it "
            "for all ranks or for none"
        )
