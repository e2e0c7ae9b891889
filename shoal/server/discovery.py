"""Where the servers of a run are, and those of them that live in this process or below it.

placement    servers live in
servers      processes that `shoal run` has started (`RunConfig.servers`); under
             another launcher the first rank of each host starts some, which end with it
rank0        a thread of worker 0
workers      a thread of every worker

On one host they listen at Unix sockets. Where workers are on several hosts, servers also listen
at a TCP port, which those of other hosts use.
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
from shoal.comm.executors.hierarchical.topology import Topology, host_id
from shoal.comm.group import Group
from shoal.comm.mesh import ReplicaGroup
from shoal.errors import BadInput, PeerLost
from shoal.runtime.config import RunConfig, ServerConfig
from shoal.runtime.cores import threads_of
from shoal.runtime.run_dir import SECRET_BYTES, RunDir, new_secret, new_server_dir
from shoal.server.server import Server
from shoal.strategy.terms import Ps

_ENTRY_BYTES = 320
_IDLE_AFTER_FAILURE_S = 5.0
_START_S = 120.0


class Home(NamedTuple):
    """Where a server is to be found: at a socket on its host, and by others if there are any."""

    host: str
    inside: str
    beyond: str

    def seen_from(self, host: str) -> str:
        return self.inside if host == self.host or not self.beyond else self.beyond


class Hosts:
    """Addresses of all servers, in order; the first one leads, or the first one of part 0.

    `leads` says for each server how it reaches the one that leads.
    """

    def __init__(self, secret: bytes, homes: Sequence[Home] = (), host: str = ""):
        self.secret = secret
        self.server: Server | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self.run_dir: RunDir | None = None
        self.settle(homes, host)

    def settle(self, homes: Sequence[Home], host: str) -> None:
        """All servers are known; this worker is on `host`."""
        self.homes = list(homes)
        self.addresses = [home.seen_from(host) for home in homes]
        self.leads = [homes[0].seen_from(home.host) for home in homes]

    def follow(self, replica_group: ReplicaGroup) -> None:
        """Let the first server of part 0 lead those of all parts."""
        said = "\n".join(self.homes[0]).encode()
        lead = Home(*replica_group.broadcast_bytes(said, _ENTRY_BYTES).decode().split("\n"))
        self.leads = [lead.seen_from(home.host) for home in self.homes]

    def close(self, failed: bool = False) -> None:
        """Stop what was started here, once nobody needs it any more."""
        if self.server is not None:
            self.server.wait_idle(_IDLE_AFTER_FAILURE_S if failed else None)
            self.server.close()
            self.server = None
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
        self.processes = []
        if self.run_dir is not None:
            self.run_dir.remove()
            self.run_dir = None


def find_hosts(
    part: Ps, group: Group, replica_group: ReplicaGroup, config: RunConfig | None = None
) -> Hosts:
    """All ranks call it together. What has to be started is started.

    Where workers are on several hosts, servers are dealt out to the hosts in turns. Servers of
    all parts of a replica know one secret.
    """
    config = config or RunConfig.from_environment()
    if part.placement == "servers" and config.servers is not None:
        return _of_launcher(part, config, config.servers)
    hosts = Hosts(_share_secret(group, replica_group, config))
    try:
        host = host_id(config.host_id).decode()
        places = _places(group, config, host)
        homes = []
        for index in range(group.size if part.placement == "workers" else part.servers):
            starter = _starter(part, places, index)
            own = ""
            if group.rank == starter:
                own = "\n".join(_start(hosts, part, index, len(places.hosts) > 1, host, config))
            homes.append(Home(*_tell(group, own, starter).split("\n")))
        hosts.settle(homes, host)
    except BaseException:
        hosts.close(failed=True)
        raise
    return hosts


def _places(group: Group, config: RunConfig, host: str) -> Topology:
    """Our own launcher starts workers on one host, and some of them may never come."""
    if config.run_dir is not None:
        return Topology((tuple(range(group.size)),), group.rank)
    return Topology.of([said.encode() for said in tell_all(group, host)], group.rank)


def _starter(part: Ps, places: Topology, index: int) -> int:
    """The rank that starts server `index`."""
    if part.placement == "workers":
        return index
    return places.hosts[index % len(places.hosts)][0] if part.placement == "servers" else 0


def _start(hosts: Hosts, part: Ps, index: int, spread: bool, host: str, config: RunConfig) -> Home:
    if hosts.run_dir is None:
        hosts.run_dir = new_server_dir()
        hosts.run_dir.write_secret(hosts.secret)
    beyond = f"tcp:{config.hostname or socket.gethostname()}:0" if spread else ""
    if part.placement == "servers":
        address = _start_process(hosts, hosts.run_dir, index, part.servers, beyond, config)
        return Home(host, hosts.run_dir.socket(index), address)
    inside = hosts.run_dir.socket(index)
    has_exited = None if config.run_dir is None else config.run_dir.has_exited
    hosts.server = Server(inside, hosts.secret, has_exited=has_exited, remote_address=beyond)
    return Home(host, inside, hosts.server.remote_address)


def _of_launcher(part: Ps, config: RunConfig, servers: int | tuple[str, ...]) -> Hosts:
    """Sockets in the run directory, or addresses."""
    secret = config.read_secret()
    run_dir = config.run_dir or RunDir(Path())
    addresses = [run_dir.socket(i) for i in range(servers)] if isinstance(servers, int) else servers
    if secret is None:
        raise BadInput("there are servers, and no secret to show them: set SHOAL_SECRET")
    if len(addresses) < part.servers:
        raise BadInput(f"{part} wants {part.servers} servers, and {len(addresses)} are there")
    return Hosts(secret, [Home("", address, "") for address in addresses[: part.servers]])


def _start_process(
    hosts: Hosts, run_dir: RunDir, index: int, servers: int, beyond: str, config: RunConfig
) -> str:
    """Start a server; returns its address for other hosts, which it writes once it listens."""
    server = ServerConfig(index, config.server.listen, beyond or None, os.getpid())
    config = replace(config, run_dir=run_dir, server=server, launcher_pid=None)
    env = config.with_environ(**threads_of(servers)).to_environment()
    command = [sys.executable, "-m", "shoal.server.main"]
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
    hosts.processes.append(process)
    if not beyond:
        return ""
    address = run_dir.server_address(index)
    deadline_s = time.monotonic() + _START_S
    while not address.exists():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise BadInput(f"server {index} does not listen at {beyond}: see its output")
        time.sleep(0.01)
    return address.read_text()


def _share_secret(group: Group, replica_group: ReplicaGroup, config: RunConfig) -> bytes:
    """Rank 0's: of its launcher, or a fresh one."""
    mine = (config.read_secret() or new_secret()) if group.rank == 0 else b""
    tensor = torch.frombuffer(bytearray(mine.ljust(SECRET_BYTES, b"\0")), dtype=torch.uint8)
    tensor = tensor[:SECRET_BYTES].clone()
    group.broadcast(tensor).wait()
    replica_group.broadcast(tensor)
    return bytes(tensor.tolist())


def tell_all(group: Group, text: str) -> list[str]:
    """What every rank says, by rank."""
    return [said.decode() for said in objects.all_gather_bytes(group, text.encode(), _ENTRY_BYTES)]


def _tell(group: Group, text: str, root: int) -> str:
    """What `root` says."""
    found = objects.broadcast_bytes(group, text.encode(), root, _ENTRY_BYTES).decode()
    if not found:
        raise PeerLost(group.rank, root, "looking for the servers")
    return found
