"""Who am I? Rank and size as the launcher of this process has written them.

    launcher   says rank and size in           ranks meet at
    shoal      SHOAL_RANK ...                  a file in the run directory: no ports at all
    torchrun   RANK, WORLD_SIZE ...            env:// (MASTER_ADDR, MASTER_PORT, agent store)
    openmpi    OMPI_COMM_WORLD_RANK ...        MASTER_ADDR if given, else a file on this host
    slurm      SLURM_PROCID ...                a port of the step's first host

The first one that is there wins: whoever was started last stands nearest to the process.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import BadInput
from shoal.launch.slurm import first_host, meeting_port, tasks_on_node

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Placement:
    """The place of one process among all: its ranks, and where the ranks meet."""

    launcher: str  # "shoal", "torchrun", "openmpi", "slurm"
    rank: int
    size: int
    local_rank: int
    local_size: int
    rendezvous: str  # file:///..., tcp://host:port or env://; `open_rendezvous` makes it usable


def detect(environ: Environ) -> Placement | None:
    """What the launcher says, or None when there is none; BadInput when it makes no sense."""
    for present, read in (
        ("SHOAL_RANK" in environ, _shoal),
        ("RANK" in environ and "WORLD_SIZE" in environ, _torchrun),
        ("OMPI_COMM_WORLD_RANK" in environ, _openmpi),
        (_is_srun_step(environ), _slurm),
    ):
        if present:
            return read(environ)
    return None


# --- ours: what is written here is read here ----------------------------------------------


def shoal_environment(placement: Placement) -> dict[str, str]:
    """The variables that tell one worker its place; `detect` reads them back."""
    return {
        "SHOAL_RANK": str(placement.rank),
        "SHOAL_SIZE": str(placement.size),
        "SHOAL_LOCAL_RANK": str(placement.local_rank),
        "SHOAL_LOCAL_SIZE": str(placement.local_size),
        "SHOAL_RENDEZVOUS": placement.rendezvous,
    }


def _shoal(environ: Environ) -> Placement:
    rendezvous = _text(environ, "SHOAL_RENDEZVOUS")
    if not rendezvous.startswith(("file:///", "tcp://", "env://")):
        raise BadInput(f"SHOAL_RENDEZVOUS is {rendezvous!r}: use file:///..., tcp://... or env://")
    names = ("SHOAL_RANK", "SHOAL_SIZE", "SHOAL_LOCAL_RANK", "SHOAL_LOCAL_SIZE")
    return _placement("shoal", environ, names, rendezvous)


# --- torchrun ------------------------------------------------------------------------------


def _torchrun(environ: Environ) -> Placement:
    _master(environ)  # env:// reads it later; a mistake in it is told now
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return _placement("torchrun", environ, names, "env://")


# --- Open MPI ------------------------------------------------------------------------------

# PMIX_NAMESPACE is made of host and pid, so it comes again; the server's port and (Open MPI 4)
# the 128 random bits of precondition_transports do not. All ranks on a host see the same ones.
_MPI_JOB_NAMES = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_hnp_uri",
    "OMPI_MCA_orte_precondition_transports",
)


def _openmpi(environ: Environ) -> Placement:
    prefix = "OMPI_COMM_WORLD_"
    names = (prefix + "RANK", prefix + "SIZE", prefix + "LOCAL_RANK", prefix + "LOCAL_SIZE")
    if "MASTER_ADDR" in environ or "MASTER_PORT" in environ:
        host, port = _master(environ)
        return _placement("openmpi", environ, names, _tcp(host, port))
    placement = _placement("openmpi", environ, names, _mpi_file(environ))
    if placement.local_size < placement.size:
        raise BadInput(
            f"mpirun has placed {placement.size} ranks on several hosts and none says where to "
            "meet: start it with mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<free port>"
        )
    return placement


def _mpi_file(environ: Environ) -> str:
    """A path that only the ranks of one mpirun on this host compute."""
    names = [*_MPI_JOB_NAMES, *sorted(n for n in environ if n.startswith("PMIX_SERVER_URI"))]
    job = [f"{name}={environ[name]}" for name in names if name in environ]
    if not job:
        raise BadInput(
            "mpirun has not said which job this is (PMIX_NAMESPACE is not set): "
            "start it with mpirun -x MASTER_ADDR=localhost -x MASTER_PORT=<free port>"
        )
    digest = hashlib.sha256("\n".join(job).encode()).hexdigest()[:32]
    home = Path(tempfile.gettempdir()).absolute() / f"shoal-{os.getuid()}"
    return f"file://{home}/mpi-{digest}"


# --- Slurm ---------------------------------------------------------------------------------

_LAST_ORDINARY_STEP = 0xFFFFFFF0  # above it: the batch script, salloc's shell, "extern"


def _is_srun_step(environ: Environ) -> bool:
    """Whether srun has started this process as one of several tasks.

    The script of sbatch and the shell of salloc have SLURM_PROCID=0 and the job's task count
    too, but no ordinary step; `srun --pty bash` is a step of one task. These run alone.
    """
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return False
    if _number(environ, "SLURM_STEP_ID") > _LAST_ORDINARY_STEP:
        return False
    return _number(environ, _slurm_size_name(environ), at_least=1) > 1


def _slurm_size_name(environ: Environ) -> str:
    return _first_name(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def _slurm(environ: Environ) -> Placement:
    rank_name = "SLURM_PROCID"
    size_name = _slurm_size_name(environ)
    per_node = _first_name(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    node = _number(environ, "SLURM_NODEID")
    local_size = tasks_on_node(per_node, _text(environ, per_node), node)
    counted = {**environ, per_node: str(local_size)}
    names = (rank_name, size_name, "SLURM_LOCALID", per_node)
    return _placement("slurm", counted, names, _slurm_rendezvous(environ))


def _slurm_rendezvous(environ: Environ) -> str:
    hosts = _first_name(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    host = environ.get("MASTER_ADDR") or first_host(hosts, _text(environ, hosts))
    if "MASTER_PORT" in environ:
        return _tcp(host, _port(environ))
    job = _number(environ, _first_name(environ, "SLURM_JOB_ID", "SLURM_JOBID"))
    return _tcp(host, meeting_port(job, _number(environ, "SLURM_STEP_ID")))


# --- reading one variable, with an error that names it --------------------------------------


def _placement(
    launcher: str, environ: Environ, names: tuple[str, str, str, str], rendezvous: str
) -> Placement:
    rank_name, size_name, local_rank_name, local_size_name = names
    rank = _number(environ, rank_name)
    local_rank = _number(environ, local_rank_name)
    size = _number(environ, size_name, at_least=1)
    local_size = _number(environ, local_size_name, at_least=1)
    for low, low_name, high, high_name in (
        (rank, rank_name, size, size_name),
        (local_rank, local_rank_name, local_size, local_size_name),
    ):
        if low >= high:
            raise BadInput(f"{low_name} is {low}, which must be less than {high_name}={high}")
    if local_size > size:
        raise BadInput(
            f"{local_size_name} is {local_size}, more than all ranks: {size_name}={size}"
        )
    return Placement(launcher, rank, size, local_rank, local_size, rendezvous)


def _first_name(environ: Environ, *names: str) -> str:
    """The first of these variables that is set; the first of all when none is."""
    return next((name for name in names if name in environ), names[0])


def _text(environ: Environ, name: str) -> str:
    if not environ.get(name):
        raise BadInput(f"{name} is not set, though the launcher's other variables are")
    return environ[name]


def _number(environ: Environ, name: str, at_least: int = 0) -> int:
    text = _text(environ, name)
    if not (text.isascii() and text.isdigit()) or int(text) < at_least:
        raise BadInput(f"{name} is {text!r}, which is not a whole number of at least {at_least}")
    return int(text)


def _master(environ: Environ) -> tuple[str, int]:
    return _text(environ, "MASTER_ADDR"), _port(environ)


def _port(environ: Environ) -> int:
    port = _number(environ, "MASTER_PORT", at_least=1)
    if port > 65535:
        raise BadInput(f"MASTER_PORT is {port}, which is not a port: the last one is 65535")
    return port


def _tcp(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
