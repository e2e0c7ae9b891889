"""Rank and size of this process, as its launcher has written them.

    launcher   writes rank and size to         rendezvous of the ranks
    shoal      SHOAL_RANK ...                  a file in the run directory: no ports at all
    torchrun   RANK, WORLD_SIZE ...            env:// (MASTER_ADDR, MASTER_PORT, agent store)
    a script   the same four, by hand          MASTER_ADDR:MASTER_PORT, where rank 0 listens
    openmpi    OMPI_COMM_WORLD_RANK ...        MASTER_ADDR if given, else a file on this host
    slurm      SLURM_PROCID ...                a port of the step's first host

The first launcher in this order counts: it is the innermost one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.errors import BadInput
from shoal.runtime.config import RunConfig, variable_name
from shoal.runtime.files import own_folder
from shoal.runtime.trust import is_loopback
from shoal.runtime.variable_text import required_count, required_text

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_BRACKETS = re.compile(r"\[(\w+)[^\]]*\]")
_HOST = re.compile(r"[\w.-]+")
_PORTS = range(20000, 60000)


def tasks_on_node(name: str, counts: str, node: int) -> int:
    """How many tasks a node has in 4(x2),3; `name` is the variable, for the error."""
    matches = [_COUNT.fullmatch(item) for item in counts.split(",")]
    remaining = node
    for match in matches:
        if match is None:
            raise BadInput(f"{name} is {counts!r}, which is not a list such as 4(x2),3")
        remaining -= int(match[2] or 1)
        if remaining < 0:
            return int(match[1])
    raise BadInput(f"{name} is {counts!r}, which has no node with the index SLURM_NODEID={node}")


def first_host(name: str, hosts: str) -> str:
    """The first host of node[01-03,07],gpu5; `name` is the variable, for the error."""
    first = _BRACKETS.sub(r"\1", hosts).split(",")[0]
    if not _HOST.fullmatch(first):
        raise BadInput(
            f"{name} is {hosts!r}, which is not a list of hosts such as node[01-03],gpu5"
        )
    return first


Environ = Mapping[str, str]
LOCAL_NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Placement:
    """The ranks of one process, and the rendezvous of all of them."""

    launcher: str  # "shoal", "torchrun", "openmpi", "slurm"
    rank: int
    size: int
    local_rank: int
    local_size: int
    rendezvous: str  # file:///..., tcp://host:port or env://; `open_rendezvous` makes it usable
    knows_hosts: bool = True  # False: `host_ranks` has to ask the other ranks
    has_gpu_each: bool | None = None  # whether no two ranks have the same one; None: not asked

    @property
    def has_several_agents(self) -> bool:
        """Whether torchrun was started more than once, on several hosts or on one."""
        return self.rendezvous == "env://" and self.local_size < self.size


def detect(config: RunConfig) -> Placement | None:
    """What the launcher has written; None without a launcher; BadInput where it is inconsistent."""
    environ = config.environ
    if config.is_launched:
        return _shoal(config)
    for present, read in (
        ("RANK" in environ and "WORLD_SIZE" in environ, _torchrun),
        ("OMPI_COMM_WORLD_RANK" in environ, _openmpi),
        (_is_srun_step(environ), _slurm),
    ):
        if present:
            placement = read(environ)
            is_ours = config.host_dir is not None  # Shoal's agent on this host knows
            return replace(placement, knows_hosts=is_ours or placement.knows_hosts)
    if "PMI_RANK" in environ and required_count(environ, "PMI_SIZE", at_least=1) > 1:
        raise BadInput(
            f"mpirun of MPICH has started {environ['PMI_SIZE']} processes, and does not say where "
            "they meet: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each, or take "
            "torchrun or Open MPI"
        )
    return None


def refuse_ranks(config: RunConfig, program: str) -> None:
    """Where mpirun, srun or torchrun has started several of what starts workers itself."""
    if config.is_launched or config.environ.get("WORLD_SIZE") == "1":
        return
    found = detect(config)
    if found is not None and found.size > 1:
        starter = {"openmpi": "mpirun", "slurm": "srun"}.get(found.launcher, found.launcher)
        raise BadInput(
            f"{starter} has started {found.size} processes of {program}, and each would start "
            f"workers of its own: let it start python and the script, with SHOAL_STRATEGY=… for "
            f"the strategy, or take {program} -n {found.size} without {starter} (rank {found.rank})"
        )


def is_one_host(placement: Placement, config: RunConfig) -> bool:
    """Whether all ranks are on this host: nothing then has to listen beyond loopback.

    torchrun may be started on it several times, with a rendezvous that other hosts do not reach.
    """
    if placement.local_size == placement.size:
        return True
    is_torchruns = placement.launcher == "torchrun" and config.host_dir is None
    return is_torchruns and is_loopback(config.environ.get("MASTER_ADDR", ""))


# --- shoal ---------------------------------------------------------------------------------


def _shoal(config: RunConfig) -> Placement:
    environ = config.to_environment()
    names = tuple(map(variable_name, ("rank", "size", "local_rank", "local_size")))
    rendezvous = required_text(environ, variable_name("rendezvous"))
    return _placement("shoal", environ, names, rendezvous)


# --- torchrun ------------------------------------------------------------------------------


def _torchrun(environ: Environ) -> Placement:
    host, port = _master(environ)
    is_served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by the agent of torchrun
    there = "env://" if is_served else _tcp(host, port)
    names = ("RANK", "WORLD_SIZE", *LOCAL_NAMES)
    if is_served:
        return _placement("torchrun", environ, names, there)
    if is_loopback(host):  # all ranks are on this host
        given = {
            name: environ.get(name) or environ[instead]
            for name, instead in zip(LOCAL_NAMES, ("RANK", "WORLD_SIZE"), strict=True)
        }
        placement = _placement("torchrun", {**environ, **given}, names, there)
        repeats = placement.local_size < placement.size  # agents of one host: a LOCAL_RANK, a GPU
        return replace(placement, has_gpu_each=False if repeats else None)
    if not all(environ.get(name) for name in LOCAL_NAMES):
        alone = {**environ, names[2]: "0", names[3]: "1"}
        return replace(_placement("torchrun", alone, names, there), knows_hosts=False)
    placement = _placement("torchrun", environ, names, there)
    return replace(placement, knows_hosts=placement.local_size == placement.size)


# --- Open MPI ------------------------------------------------------------------------------

# PMIX_NAMESPACE is made of host and pid, so it repeats; the server's port and (Open MPI 4) the
# 128 random bits of precondition_transports do not. All ranks on a host see the same values.
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
            f"mpirun has placed {placement.size} ranks on several hosts without an address for the "
            "rendezvous: start it with mpirun -x MASTER_ADDR=<host of rank 0> "
            "-x MASTER_PORT=<free port>"
        )
    return placement


def _mpi_file(environ: Environ) -> str:
    """A path that only the ranks of one mpirun on this host compute."""
    names = [*_MPI_JOB_NAMES, *sorted(n for n in environ if n.startswith("PMIX_SERVER_URI"))]
    job = [f"{name}={environ[name]}" for name in names if name in environ]
    if not job:
        raise BadInput(
            "mpirun does not identify this job (PMIX_NAMESPACE is not set): "
            "start it with mpirun -x MASTER_ADDR=localhost -x MASTER_PORT=<free port>"
        )
    digest = hashlib.sha256("\n".join(job).encode()).hexdigest()[:32]
    return f"file://{own_folder()}/mpi-{digest}"


# --- Slurm ---------------------------------------------------------------------------------

_LAST_ORDINARY_STEP = 0xFFFFFFF0  # above it: the batch script, salloc's shell, "extern"


def _is_srun_step(environ: Environ) -> bool:
    """Whether srun has started this process as one of several tasks.

    The script of sbatch and the shell of salloc have SLURM_PROCID=0 and the job's task count
    too, but no ordinary step; `srun --pty bash` is a step of one task. Both are one worker.
    """
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return False
    is_ordinary = required_count(environ, "SLURM_STEP_ID") <= _LAST_ORDINARY_STEP
    return is_ordinary and required_count(environ, _slurm_size_name(environ), at_least=1) > 1


def _slurm_size_name(environ: Environ) -> str:
    return _first_name(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def _slurm(environ: Environ) -> Placement:
    per_node = _first_name(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    node = required_count(environ, "SLURM_NODEID")
    local_size = tasks_on_node(per_node, required_text(environ, per_node), node)
    counted = {**environ, per_node: str(local_size)}
    names = ("SLURM_PROCID", _slurm_size_name(environ), "SLURM_LOCALID", per_node)
    placement = _placement("slurm", counted, names, _slurm_rendezvous(environ))
    shows_own_gpus = "SLURM_GPUS_PER_TASK" in environ  # each task may see its own ones alone
    return replace(placement, has_gpu_each=True if shows_own_gpus else None)


def _slurm_rendezvous(environ: Environ) -> str:
    hosts = _first_name(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    host = environ.get("MASTER_ADDR") or first_host(hosts, required_text(environ, hosts))
    if "MASTER_PORT" in environ:
        return _tcp(host, _port(environ))
    job = required_count(environ, _first_name(environ, "SLURM_JOB_ID", "SLURM_JOBID"))
    # all tasks of a step compute it; the factor separates neighbouring jobs
    return _tcp(host, _PORTS[(job * 1009 + required_count(environ, "SLURM_STEP_ID")) % len(_PORTS)])


# --- all of them ---------------------------------------------------------------------------


def _placement(launcher: str, environ: Environ, names: Sequence[str], rendezvous: str) -> Placement:
    rank_name, size_name, local_rank_name, local_size_name = names
    rank = required_count(environ, rank_name)
    local_rank = required_count(environ, local_rank_name)
    size = required_count(environ, size_name, at_least=1)
    local_size = required_count(environ, local_size_name, at_least=1)
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
    """The first of these variables that is set; the first name when none is."""
    return next((name for name in names if name in environ), names[0])


def _master(environ: Environ) -> tuple[str, int]:
    return required_text(environ, "MASTER_ADDR"), _port(environ)


def _port(environ: Environ) -> int:
    port = required_count(environ, "MASTER_PORT", at_least=1)
    if port > 65535:
        raise BadInput(f"MASTER_PORT is {port}, which is not a port: the last one is 65535")
    return port


def _tcp(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
