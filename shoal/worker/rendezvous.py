"""Rendezvous through a file, for ranks of one host under torchrun, mpirun or Shoal's own launcher.

Others could disturb ranks in the store of torchrun's agent, which is open to every user.

A script may call `shoal.run` twice, and `mpirun -n 2 sh -c 'python a.py; python b.py'` gives
both programs the same variables. Rank 0 may then be at the second rendezvous while rank 1 is
still at the first, and two of them in one file hang. So each visit gets a file of its own:
every rank counts its visits with marks in the job's directory. The last rank to leave removes it.

    /tmp/shoal-1000/               mode 0700, owned by this user; locked while marks change
        key                        between processes of this host: see runtime/trust.py
        mpi-5e1f.../               Placement.rendezvous of one mpirun; torchrun-…
            in-0-0  out-0-0        rank 0 entered (the file holds its pid) and left: visit 0
            in-1-0
            store-0                torch's FileStore of visit 0

Under Shoal's own launcher the two directories are the run directory and `store/` in it.

Which ranks share a host, where RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are all there is.

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

import hashlib
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

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
from shoal.runtime.files import locked, make_private, own_folder
from shoal.runtime.trust import require_protected
from shoal.runtime.variable_text import parse_count
from shoal.runtime.waits import Backoff
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


@contextmanager
def open_rendezvous(placement: Placement, environ: Mapping[str, str] = {}) -> Iterator[str]:
    """The init_method for torch.distributed; its files exist while the block runs."""
    there = _torchrun_file(placement, environ) or placement.rendezvous
    rank = placement.rank
    if not there.startswith("file://"):
        yield there
        return
    job = Path(there.removeprefix("file://"))
    make_private(job.parent)
    with locked(job.parent, os.O_DIRECTORY):
        for one in {job, *job.parent.glob(f"{job.name.partition('-')[0]}-*")}:
            if _is_abandoned(one):
                shutil.rmtree(one)
        job.mkdir(mode=0o700, exist_ok=True)
        visit = len(list(job.glob(f"in-{rank}-*")))
        (job / f"in-{rank}-{visit}").write_text(str(os.getpid()))
    try:
        yield f"{there}/store-{visit}"
    finally:
        with suppress(FileNotFoundError), locked(job.parent, os.O_DIRECTORY):
            (job / f"out-{rank}-{visit}").touch()
            entered, left = (len(list(job.glob(marks))) for marks in ("in-*", "out-*"))
            if entered == left == placement.size * (visit + 1):
                shutil.rmtree(job)


def _torchrun_file(placement: Placement, environ: Mapping[str, str]) -> str | None:
    """A path that only the ranks of one start by one torchrun compute; None for other ranks.

    torchrun names a new folder, with a random name, for the errors of each start.
    """
    errors = environ.get("TORCHELASTIC_ERROR_FILE")
    if placement.rendezvous != "env://" or placement.local_size < placement.size or not errors:
        return None
    start = f"{Path(errors).parents[1]}\n{environ.get('MASTER_PORT')}"
    return f"file://{own_folder()}/torchrun-{hashlib.sha256(start.encode()).hexdigest()[:32]}"


def _is_abandoned(job: Path) -> bool:
    """Whether a crashed job of the same name left marks: ranks that never left and have exited."""
    inside = [
        mark for mark in job.glob("in-*") if not mark.with_name(f"out{mark.name[2:]}").exists()
    ]
    return bool(inside) and not any(_is_alive(int(mark.read_text())) for mark in inside)


def _is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


_CONNECT_S = 20.0  # agents listen before they start ranks
_ANSWER_S = 5.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


def require_agent_store(placement: Placement, environ: Mapping[str, str]) -> None:
    """ShoalError where torchrun was killed while this rank was starting; torch waits for long."""
    if placement.rendezvous != "env://":
        return
    address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    deadline_s = time.monotonic() + _CONNECT_S
    pause = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while True:
        try:
            socket.create_connection(address, _ANSWER_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise ShoalError(
                    f"rank {placement.rank}: torchrun's agent does not answer at {address[0]}:"
                    f"{address[1]} ({error.strerror or error}): it was killed, or its host is gone"
                ) from error
        pause()
