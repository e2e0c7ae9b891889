"""Find the servers of a run, or start them.

placement    servers run in
servers      processes that `shoal run` has started (`RunConfig.servers`); under another launcher
             the first rank of each host starts some, which end with it
rank0        a thread of worker 0
workers      a thread of every worker

Servers listen at Unix sockets. Where workers are on several hosts, servers also listen at a TCP
port, which workers of other hosts use.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from shoal.comm import objects
from shoal.comm.executors.hierarchical.topology import Topology
from shoal.comm.group import Group
from shoal.comm.mesh import ReplicaGroup
from shoal.errors import BadInput, ShoalError
from shoal.runtime.config import RunConfig, ServerConfig
from shoal.runtime.cores import threads_of
from shoal.runtime.run_dir import RunDir, new_server_dir
from shoal.server.introduction import Announcer, Introduction, introduce
from shoal.server.saving.background import ShardSaver
from shoal.server.server import Server
from shoal.strategy.terms import Ps

_MAX_ADDRESS_BYTES = 320
_IDLE_AFTER_FAILURE_S = 5.0
_START_TIMEOUT_S = 120.0
_POLL_S = 0.01


class ServerAddress(NamedTuple):
    """Where a server listens: at a socket of its host, and for other hosts if there are any."""

    host: str
    local: str
    remote: str

    def seen_from(self, host: str) -> str:
        return self.local if host == self.host or not self.remote else self.remote

    def encode(self) -> bytes:
        return "\n".join(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> ServerAddress:
        words = data.decode(errors="replace").split("\n")
        if len(words) != 3:
            raise ShoalError("the address of a server is not one")
        return cls(*words)


class ServerSet:
    """All servers of a run in order, as one worker reaches them; the first is the leader."""

    def __init__(
        self,
        announcer: Announcer,
        servers: Sequence[ServerAddress],
        host: str = "",
        started: StartedServers | None = None,
    ):
        """The worker is on `host`; `started` are the servers that it has started."""
        self.announcer = announcer
        self.secret = announcer.secret
        self.addresses: list[str | tuple[str, ...]] = [s.seen_from(host) for s in servers]
        self._servers = list(servers)
        self._leader = servers[0]
        self._started = started

    @property
    def leaders(self) -> list[str]:
        """The address of the leader, as each server reaches it."""
        return [self._leader.seen_from(server.host) for server in self._servers]

    @property
    def has_replicas(self) -> bool:
        """Whether each server is a chain of replicas, with an address each."""
        return any(isinstance(address, tuple) for address in self.addresses)

    def seen_by(self, index: int) -> list[str]:
        """The addresses of all servers, as server `index` reaches them."""
        host = self._servers[index].host
        return [server.seen_from(host) for server in self._servers]

    @property
    def has_processes(self) -> bool:
        """Whether this worker has started server processes, and has to end them."""
        return self._started is not None and bool(self._started.processes)

    @property
    def server_here(self) -> Server | None:
        """The server that runs as a thread of this worker."""
        return None if self._started is None else self._started.server

    def follow(self, replica_group: ReplicaGroup) -> None:
        """Let the first server of shard 0 lead the servers of all shards of the replica."""
        first = self._servers[0].encode()
        leader = replica_group.broadcast_bytes(first, _MAX_ADDRESS_BYTES)
        self._leader = ServerAddress.decode(leader)

    def close(self, failed: bool = False) -> None:
        if self._started is not None:
            self._started.close(failed)


class StartedServers:
    """The servers that this process has started, as a thread or as processes."""

    def __init__(self, secret: bytes, config: RunConfig, run_dir: RunDir | None = None):
        """`run_dir` holds the secret already, where this worker has made it."""
        self.secret = secret
        self.config = config
        self.processes: list[subprocess.Popen[bytes]] = []
        self.server: Server | None = None
        self._run_dir = run_dir

    def start(self, term: Ps, index: int, host: str, has_remote_workers: bool) -> ServerAddress:
        """Start server `index` on this host."""
        if self._run_dir is None:
            self._run_dir = new_server_dir()
            self._run_dir.write_secret(self.secret)
        local = self._run_dir.socket(index)
        remote = ""
        if has_remote_workers:
            remote = f"tcp:{self.config.hostname or socket.gethostname()}:0"
        if term.placement == "servers":
            return ServerAddress(host, local, self._start_process(term, index, remote))
        return ServerAddress(host, local, self._start_thread(term, local, remote))

    def close(self, failed: bool = False) -> None:
        """End them when no worker uses them; after a failure, after a few seconds."""
        if self.server is not None:
            self.server.wait_idle(_IDLE_AFTER_FAILURE_S if failed else None)
            self.server.close()
            self.server = None
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
        self.processes = []
        if self._run_dir is not None:
            self._run_dir.remove()
            self._run_dir = None

    def _start_thread(self, term: Ps, local: str, remote: str) -> str:
        """Returns the address for other hosts."""
        run_dir = self.config.run_dir
        has_exited = None if run_dir is None else run_dir.has_exited
        self.server = Server(
            local,
            self.secret,
            has_exited=has_exited,
            remote_address=remote,
            tls=self.config.tls,
        )
        if term.on != "cpu":
            self.server.host.device = device_of_server(term)
        folder = self.config.server_checkpoint.folder
        if folder is not None:
            self.server.host.saver = ShardSaver(folder, "a server")
        return self.server.remote_address

    def _start_process(self, term: Ps, index: int, remote: str) -> str:
        """Returns the address for other hosts, which the process writes once it listens."""
        assert self._run_dir is not None
        server = ServerConfig(index, self.config.server.listen, remote or None, os.getpid())
        config = replace(self.config, run_dir=self._run_dir, server=server, launcher_pid=None)
        env = config.with_environ(**threads_of(term.servers)).to_environment()
        command = [sys.executable, "-m", "shoal.server.main"]
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
        self.processes.append(process)
        if not remote:
            return ""
        address_file = self._run_dir.server_address(index)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not address_file.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise BadInput(f"server {index} does not listen at {remote}: see its output")
            time.sleep(_POLL_S)
        return address_file.read_text()


def device_of_server(term: Ps) -> torch.device:
    """The GPU of the worker whose thread the server is."""
    if not torch.cuda.is_available():
        raise BadInput(f'{term} keeps weights on a GPU, and there is no CUDA here: use on="cpu"')
    return torch.device("cuda", torch.cuda.current_device())


def find_or_start_servers(
    term: Ps, group: Group, replica_group: ReplicaGroup, config: RunConfig
) -> ServerSet:
    """All ranks call it together. Servers of all shards of a replica have one secret."""
    if term.placement == "servers" and config.servers is not None:
        return _launched(term, config, config.servers)
    if term.replicas > 1:
        raise BadInput(
            f"{term}: servers with replicas are started by `shoal run`, with a coordinator beside "
            "them; under another launcher start them yourself and name them all in SHOAL_SERVERS"
        )
    met = introduce(group, replica_group, config)
    started = StartedServers(met.announcer.secret, config, met.secret_dir)
    try:
        return _start(term, group, met, started)
    except BaseException:
        started.close(failed=True)
        raise


def _launched(term: Ps, config: RunConfig, servers: int | tuple[str, ...]) -> ServerSet:
    """Servers of a launcher: a number of sockets in the run directory, or addresses."""
    secret = config.read_secret()
    run_dir = config.run_dir or RunDir(Path())
    addresses = [run_dir.socket(i) for i in range(servers)] if isinstance(servers, int) else servers
    if secret is None:
        raise BadInput("SHOAL_SERVERS names servers, and there is no secret: set SHOAL_SECRET")
    needed = term.servers * term.replicas
    if len(addresses) < needed:
        raise BadInput(f"{term} needs {needed} servers, and there are {len(addresses)}")
    firsts = [ServerAddress("", address, "") for address in addresses[: needed : term.replicas]]
    found = ServerSet(Announcer(secret), firsts)
    if term.replicas > 1:
        starts = range(0, needed, term.replicas)
        found.addresses = [tuple(addresses[start : start + term.replicas]) for start in starts]
    return found


def _start(term: Ps, group: Group, met: Introduction, started: StartedServers) -> ServerSet:
    """Start all servers, each on one rank; servers are assigned to hosts in turn."""
    topology = met.topology
    servers = []
    for index in range(group.size if term.placement == "workers" else term.servers):
        starter = _starter(term, topology, index)
        encoded = b""
        if group.rank == starter:
            has_remote_workers = len(topology.hosts) > 1
            encoded = started.start(term, index, met.host, has_remote_workers).encode()
        told = met.announcer.broadcast(group, f"the address of server {index}", encoded, starter)
        servers.append(ServerAddress.decode(told))
    return ServerSet(met.announcer, servers, met.host, started)


def _starter(term: Ps, topology: Topology, index: int) -> int:
    """The rank that starts server `index`."""
    if term.placement == "workers":
        return index
    if term.placement == "servers":
        return topology.hosts[index % len(topology.hosts)][0]
    return 0


def all_gather_text(group: Group, text: str) -> list[str]:
    """The text of every rank, by rank."""
    gathered = objects.all_gather_bytes(group, text.encode(), _MAX_ADDRESS_BYTES)
    return [data.decode() for data in gathered]
