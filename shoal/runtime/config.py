"""RunConfig: every environment variable of Shoal, typed, in one place.

A process reads its environment once, where it starts (`RunConfig.from_environment`), and passes
the values down. A launcher changes the values (`dataclasses.replace`) and writes them for the
processes that it starts (`to_environment`), so both sides share one definition of each name.

    launcher   from_environment -> replace -> to_environment -> Popen(env=...)
    worker     shoal.run -> from_environment -> device, group, job, parameter servers
    server     python -m shoal.server.main -> from_environment -> Server

No other file of Shoal uses os.environ.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from shoal.runtime.run_dir import RunDir
from shoal.runtime.secret import read_secret_file
from shoal.runtime.variable_text import (
    COORDINATOR,
    COUNT,
    FLAG,
    INTEGER,
    LEASE,
    PATH,
    POSITIVE,
    RENDEZVOUS,
    RUN_DIR,
    SECONDS,
    SECRET,
    SERVERS,
    START_METHOD,
    TEXT,
    WORDS,
    parse_count,
    variable,
)


@dataclass(frozen=True)
class TlsConfig:
    """How connections to other hosts are protected."""

    certificate: str | None = variable("SHOAL_TLS_CERT", TEXT)
    key: str | None = variable("SHOAL_TLS_KEY", TEXT)
    authority: str | None = variable("SHOAL_TLS_CA", TEXT)
    trusted_network: bool = variable("SHOAL_TRUSTED_NETWORK", FLAG, False)

    @property
    def is_mutual(self) -> bool:
        """Whether there is all that both sides need to show each other a certificate."""
        return bool(self.certificate and self.key and self.authority)


@dataclass(frozen=True)
class ServerConfig:
    """One server process."""

    index: int | None = variable("SHOAL_SERVER_INDEX", COUNT)
    listen: str | None = variable("SHOAL_SERVER_LISTEN", TEXT)  # default: a socket of the run
    beyond: str | None = variable("SHOAL_SERVER_BEYOND", TEXT)  # a second address, for other hosts
    parent_pid: int | None = variable("SHOAL_SERVER_PARENT", COUNT)  # it ends with this process
    replicas: int = variable("SHOAL_SERVER_REPLICAS", POSITIVE, 1)  # of each shard, in a chain
    consistency: str = variable("SHOAL_SERVER_CONSISTENCY", TEXT, "strong")  # or "eventual"

    @property
    def shard(self) -> int:
        """Servers are numbered shard by shard: 0, 1 and 2 are the replicas of shard 0."""
        return (self.index or 0) // self.replicas

    @property
    def replica(self) -> int:
        return (self.index or 0) % self.replicas


@dataclass(frozen=True)
class ServerCheckpointConfig:
    """Periodic checkpoints of servers; off without a folder."""

    folder: Path | None = variable("SHOAL_SERVER_CHECKPOINT", PATH)
    every: int = variable("SHOAL_SERVER_CHECKPOINT_EVERY", POSITIVE, 100)  # steps
    resume: bool = variable("SHOAL_SERVER_CHECKPOINT_RESUME", FLAG, False)  # from the latest one


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints that the job saves, and goes on from, by itself; off without a folder."""

    folder: Path | None = variable("SHOAL_CHECKPOINT", PATH)
    every: int = variable("SHOAL_CHECKPOINT_EVERY", POSITIVE, 100)  # steps

    def of_call(self, number: int) -> CheckpointConfig:
        """For this call of shoal.run in a script: calls after the first have folders below."""
        if self.folder is None or number <= 1:
            return self
        return replace(self, folder=self.folder / f"call-{number}")


@dataclass(frozen=True)
class EtcdConfig:
    """Files for TLS with the members of an etcd cluster (etcds://)."""

    authority: str | None = variable("SHOAL_ETCD_CA", TEXT)  # default: those of the system
    certificate: str | None = variable("SHOAL_ETCD_CERT", TEXT)  # where etcd asks for one
    key: str | None = variable("SHOAL_ETCD_KEY", TEXT)


@dataclass(frozen=True)
class WaitConfig:
    """When a wait for another process is worth a line on stderr, and when it ends."""

    notice_s: float = variable("SHOAL_WAIT_NOTICE", SECONDS, 10.0)
    repeat_s: float = variable("SHOAL_WAIT_REPEAT", SECONDS, 60.0)
    limit_s: float | None = variable("SHOAL_TIMEOUT", SECONDS)  # `shoal run --timeout`

    @property
    def pause_s(self) -> float:
        """Between two looks at what waits."""
        return min(1.0, min(self.notice_s, self.repeat_s, self.limit_s or self.notice_s) / 4)


@dataclass(frozen=True)
class CaptureConfig:
    """What `shoal verify` asks of a script; off without a folder."""

    folder: Path | None = variable("SHOAL_CAPTURE_DIR", PATH)  # rank 0 writes here
    steps: int = variable("SHOAL_CAPTURE_STEPS", POSITIVE, 20)  # the script stops after them
    pieces: int = variable("SHOAL_CAPTURE_PARTS", POSITIVE, 1)  # of each micro-batch
    double: bool = variable("SHOAL_CAPTURE_DOUBLE", FLAG, False)  # compute in float64
    optimizer: bool = variable("SHOAL_CAPTURE_OPTIMIZER", FLAG, False)  # write its state, too
    early: int | None = variable("SHOAL_CAPTURE_EARLY", POSITIVE)  # write after so many steps, too


@dataclass(frozen=True)
class MemoryProbeConfig:
    """What `shoal memory --measure` asks of a script; off without a folder."""

    folder: Path | None = variable("SHOAL_PROBE_DIR", PATH)  # each rank writes here
    steps: int = variable("SHOAL_PROBE_STEPS", POSITIVE, 2)  # the script stops after them


@dataclass(frozen=True)
class MemoryEstimateConfig:
    """What `shoal memory` asks of a script; off without a folder."""

    folder: Path | None = variable("SHOAL_ESTIMATE_DIR", PATH)
    strategy: str = variable("SHOAL_ESTIMATE_STRATEGY", TEXT, "single")  # one a line
    workers: int = variable("SHOAL_ESTIMATE_WORKERS", POSITIVE, 1)
    on_cpu: bool = variable("SHOAL_ESTIMATE_CPU", FLAG, False)  # of one host


PROFILE = "profile.json"  # in the folder of a WorkloadTraceConfig


@dataclass(frozen=True)
class WorkloadTraceConfig:
    """What `shoal predict` and `shoal plan` ask of a script; off without a folder.

    With `profile_s` workers compute its first batch for so long and write the times of passes.
    """

    folder: Path | None = variable("SHOAL_WORKLOAD_DIR", PATH)
    profile_s: float = variable("SHOAL_PROFILE_SECONDS", SECONDS, 0.0)


@dataclass(frozen=True)
class RunConfig:
    """The configuration of one process; None where a variable is not set."""

    strategy: str | None = variable("SHOAL_STRATEGY", TEXT)
    seed: int | None = variable("SHOAL_SEED", INTEGER)
    device: str | None = variable("SHOAL_DEVICE", TEXT)
    call: int | None = variable("SHOAL_CALL", COUNT)  # which call of shoal.run in the script
    returned: Path | None = variable("SHOAL_RETURNED", PATH)  # what calls have returned
    slow: tuple[str, ...] = variable("SHOAL_SLOW", WORDS, ())  # as `shoal run --slow` takes them
    kill: tuple[str, ...] = variable("SHOAL_KILL", WORDS, ())

    restarts: int | None = variable("SHOAL_RESTART", COUNT)  # `shoal run --restart`
    start: int | None = variable("SHOAL_START", POSITIVE)  # workers at first; others come later
    start_method: str = variable("SHOAL_START_METHOD", START_METHOD, "fork")  # of workers
    min_workers: int = variable("SHOAL_MIN_WORKERS", POSITIVE, 1)  # with fewer the run ends
    incarnation: int = variable("SHOAL_INCARNATION", COUNT, 0)  # starts of this worker before this

    rank: int | None = variable("SHOAL_RANK", COUNT)  # written by Shoal's own launcher
    size: int | None = variable("SHOAL_SIZE", POSITIVE)
    local_rank: int | None = variable("SHOAL_LOCAL_RANK", COUNT)
    local_size: int | None = variable("SHOAL_LOCAL_SIZE", POSITIVE)
    rendezvous: str | None = variable("SHOAL_RENDEZVOUS", RENDEZVOUS)

    grace_s: float = variable("SHOAL_GRACE", SECONDS, 30.0)  # from SIGTERM to SIGKILL
    run_dir: RunDir | None = variable("SHOAL_RUN_DIR", RUN_DIR)
    host_dir: RunDir | None = variable("SHOAL_HOST_DIR", RUN_DIR)  # of the agent of this host
    board: str | None = variable("SHOAL_BOARD", TEXT)  # HOST:PORT, of an elastic run over hosts
    launcher_pid: int | None = variable("SHOAL_LAUNCHER_PID", COUNT)
    progress_fd: int | None = variable("SHOAL_PROGRESS_FD", COUNT)
    trace_dir: Path | None = variable("SHOAL_TRACE_DIR", PATH)
    jsonl: Path | None = variable("SHOAL_JSONL", PATH)  # the first worker appends to it
    tensorboard: Path | None = variable("SHOAL_TENSORBOARD", PATH)
    host_id: str | None = variable("SHOAL_HOST_ID", TEXT)  # ranks with the same one share memory
    hostname: str | None = variable("SHOAL_HOST", TEXT)  # the name that other hosts use
    host_order: tuple[str, ...] = variable("SHOAL_HOST_ORDER", WORDS, ())  # of the ring
    rack: str | None = variable("SHOAL_RACK", TEXT)  # of this host: any name
    hosts_per_rack: int | None = variable("SHOAL_HOSTS_PER_RACK", POSITIVE)  # they fill racks

    servers: int | tuple[str, ...] | None = variable("SHOAL_SERVERS", SERVERS)
    secret: bytes | None = variable("SHOAL_SECRET", SECRET, show=False)
    secret_file: Path | None = variable("SHOAL_SECRET_FILE", PATH)  # holds the same, mode 0600
    server: ServerConfig = field(default_factory=ServerConfig)
    server_checkpoint: ServerCheckpointConfig = field(default_factory=ServerCheckpointConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)

    coordinator: str | None = variable("SHOAL_COORDINATOR", COORDINATOR)  # of replicated servers
    coordinator_beyond: str | None = variable("SHOAL_COORDINATOR_BEYOND", TEXT)  # for other hosts
    etcd: EtcdConfig = field(default_factory=EtcdConfig)
    lease_s: float | None = variable("SHOAL_LEASE", LEASE)  # of replicated servers

    wait: WaitConfig = field(default_factory=WaitConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    memory_probe: MemoryProbeConfig = field(default_factory=MemoryProbeConfig)
    memory_estimate: MemoryEstimateConfig = field(default_factory=MemoryEstimateConfig)
    workload_trace: WorkloadTraceConfig = field(default_factory=WorkloadTraceConfig)

    environ: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """All other variables: those of torchrun, MPI and Slurm, PATH, OMP_NUM_THREADS."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> RunConfig:
        """Read `environ`, by default that of this process; BadInput names a bad variable."""
        environ = os.environ if environ is None else environ
        others = {name: text for name, text in environ.items() if name not in VARIABLES}
        return cls(**_read(cls, environ), environ=others)

    def to_environment(self) -> dict[str, str]:
        """The variables that `from_environment` reads back as this configuration."""
        return {**self.environ, **_write(self)}

    def export(self) -> None:
        """Make this configuration the environment of this process, for its children."""
        for name in VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(self.to_environment())

    def with_environ(self, **others: str) -> RunConfig:
        """The same with other values for variables that are not Shoal's."""
        return replace(self, environ={**self.environ, **others})

    @property
    def takes_back(self) -> bool:
        """Whether workers may come, or come back, after the start."""
        return bool(self.restarts) or self.start is not None

    @property
    def is_launched(self) -> bool:
        """Whether Shoal's own launcher started this worker."""
        return self.rank is not None

    @property
    def num_threads(self) -> int | None:
        """OMP_NUM_THREADS, where it is one number."""
        text = self.environ.get("OMP_NUM_THREADS")
        return parse_count("OMP_NUM_THREADS", text, at_least=1) if text else None

    def read_secret(self) -> bytes | None:
        """The secret of this run: from its directory, SHOAL_SECRET, SHOAL_SECRET_FILE, own_key."""
        of_run = None if self.run_dir is None else self.run_dir.read_secret()
        if of_run is not None or self.secret is not None:
            return of_run or self.secret
        if self.secret_file is not None:
            return read_secret_file(self.secret_file)
        return read_secret_file(self.own_key) if os.path.lexists(self.own_key) else None

    @property
    def own_key(self) -> Path:
        """Where the key of this user is on every host, if there is one (`shoal keys new`)."""
        home = self.environ.get("HOME") or os.path.expanduser("~")
        folder = self.environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
        return Path(folder) / "shoal" / "key"


def set_default_variables(**variables: str) -> None:
    """For libraries that read the environment of this process; what the user has set stays."""
    for name, text in variables.items():
        os.environ.setdefault(name, text)


def replace_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """This process is one that was started with these variables, and no others; those before."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    return before


_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # torch takes both from the environment only
_GLOO_LAZY = "TORCH_GLOO_LAZY_INIT"


@contextmanager
def gloo_settings(is_one_host: bool, is_unused: bool = False) -> Iterator[None]:
    """Inside the block Gloo listens at loopback, if all ranks are on one host.

    An interface that the user has named stays. `is_unused`: for ranks of several hosts that Shoal
    joins itself, whose group of torch is a name and a store: Gloo then connects to no other rank
    before its first use, and at loopback only.
    """
    before = {name: os.environ.get(name) for name in (_GLOO_INTERFACE, _GLOO_LAZY)}
    if not is_unused and (not is_one_host or before[_GLOO_INTERFACE]):
        yield
        return
    if is_unused:
        os.environ.pop(_GLOO_INTERFACE, None)
        os.environ[_GLOO_LAZY] = "1"
    loopbacks = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopbacks and _has_loopback():
        os.environ[_GLOO_INTERFACE] = loopbacks.pop()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def no_watchdog() -> None:
    """From now on torch starts none for NCCL: it prints frames of C++, and ends the process."""
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")


def _has_loopback() -> bool:
    """Whether the interface is up."""
    try:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
    except OSError:
        return False
    return True


def variable_name(field_name: str, config: type[Any] = RunConfig) -> str:
    """The environment variable of a field of RunConfig or of a class inside it, for errors."""
    return str(next(f.metadata["variable"] for f in fields(config) if f.name == field_name))


def _variables(cls: Any) -> Iterator[Field[Any]]:
    return (f for f in fields(cls) if "variable" in f.metadata)


def _read(cls: type, environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for f in _variables(cls):
        name = f.metadata["variable"]
        text = environ.get(name)
        if text:
            values[f.name] = f.metadata["codec"].read(name, text)
    for section_name, section in (_SECTIONS if cls is RunConfig else {}).items():
        values[section_name] = section(**_read(section, environ))
    return values


def _write(config: Any) -> dict[str, str]:
    texts: dict[str, str] = {}
    for f in _variables(config):
        value = getattr(config, f.name)
        if value != f.default:
            texts[f.metadata["variable"]] = f.metadata["codec"].write(value)
    for section_name in _SECTIONS if isinstance(config, RunConfig) else ():
        texts.update(_write(getattr(config, section_name)))
    return texts


_SECTIONS: dict[str, Any] = {
    f.name: f.default_factory for f in fields(RunConfig) if is_dataclass(f.default_factory)
}
VARIABLES = frozenset(
    f.metadata["variable"] for cls in (RunConfig, *_SECTIONS.values()) for f in _variables(cls)
)
