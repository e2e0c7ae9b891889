"""Where the servers of a run are, and those of them that live in this process or below it.

placement    servers live in
servers      processes that `shoal run` has started (SHOAL_SERVERS, SHOAL_RUN_DIR); under
             another launcher the first rank of each host starts some, which end with it
rank0        a thread of worker 0
workers      a thread of every worker

On one host they listen at Unix sockets. Where workers are on several hosts, servers also listen
at a TCP port, which those of other hosts use.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from shoal.comm import objects
from shoal.comm.executors.hierarchical.topology import Topology, host_id
from shoal.comm.group import Group
from shoal.comm.mesh import ReplicaGroup
from shoal.errors import BadInput, PeerLost
from shoal.runtime.cores import threads_of
from shoal.runtime.gone import gone_in
from shoal.server.protocol.handshake import SECRET_BYTES, fresh_secret, read_secret, write_secret
from shoal.server.server import Server
from shoal.strategy.terms import Ps

_ENTRY_BYTES = 320
_LONGEST_SOCKET_PATH = 100
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
        self.folder: Path | None = None
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
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


def find_hosts(
    part: Ps, group: Group, replica_group: ReplicaGroup, environ: Mapping[str, str] = os.environ
) -> Hosts:
    """All ranks call it together. What has to be started is started.

    Where workers are on several hosts, servers are dealt out to the hosts in turns. Servers of
    all parts of a replica know one secret.
    """
    if part.placement == "servers" and environ.get("SHOAL_SERVERS"):
        return _of_launcher(part, environ)
    hosts = Hosts(_share_secret(group, replica_group, environ))
    try:
        places = _places(group, environ)
        host = host_id().decode()
        homes = []
        for index in range(group.size if part.placement == "workers" else part.servers):
            starter = _starter(part, places, index)
            own = ""
            if group.rank == starter:
                own = "\n".join(_start(hosts, part, index, len(places.hosts) > 1, host, environ))
            homes.append(Home(*_tell(group, own, starter).split("\n")))
        hosts.settle(homes, host)
    except BaseException:
        hosts.close(failed=True)
        raise
    return hosts


def _places(group: Group, environ: Mapping[str, str]) -> Topology:
    """Our own launcher starts workers on one host, and some of them may never come."""
    if environ.get("SHOAL_RUN_DIR"):
        return Topology((tuple(range(group.size)),), group.rank)
    return Topology.of([said.encode() for said in tell_all(group, host_id().decode())], group.rank)


def _starter(part: Ps, places: Topology, index: int) -> int:
    """The rank that starts server `index`."""
    if part.placement == "workers":
        return index
    return places.hosts[index % len(places.hosts)][0] if part.placement == "servers" else 0


def _start(
    hosts: Hosts, part: Ps, index: int, spread: bool, host: str, environ: Mapping[str, str]
) -> Home:
    if hosts.folder is None:
        hosts.folder = _folder()
        write_secret(hosts.folder, hosts.secret)
    beyond = f"tcp:{environ.get('SHOAL_HOST') or socket.gethostname()}:0" if spread else ""
    if part.placement == "servers":
        return Home(host, *_start_process(hosts, index, part.servers, beyond, environ))
    inside = socket_of(hosts.folder, index)
    hosts.server = Server(inside, hosts.secret, has_exited=gone_in(environ), remote_address=beyond)
    return Home(host, inside, hosts.server.remote_address)


def socket_of(run_dir: str | Path, index: int) -> str:
    """Where server `index` of a run listens on this host."""
    return f"unix:{Path(run_dir) / f'server-{index}.sock'}"


def _of_launcher(part: Ps, environ: Mapping[str, str]) -> Hosts:
    """`SHOAL_SERVERS` is a number of sockets in the run directory, or addresses with commas."""
    text = environ["SHOAL_SERVERS"]
    secret = read_secret(environ)
    run_dir = environ.get("SHOAL_RUN_DIR", "")
    addresses = (
        [socket_of(run_dir, i) for i in range(int(text))] if text.isdigit() else text.split(",")
    )
    if secret is None:
        raise BadInput("there are servers, and no secret to show them: set SHOAL_SECRET")
    if len(addresses) < part.servers:
        raise BadInput(f"{part} wants {part.servers} servers, and {len(addresses)} are there")
    return Hosts(secret, [Home("", address, "") for address in addresses[: part.servers]])


def _start_process(
    hosts: Hosts, index: int, servers: int, beyond: str, environ: Mapping[str, str]
) -> tuple[str, str]:
    """Its addresses. That of other hosts is known when it listens, which it leaves word of."""
    assert hosts.folder is not None
    env = {
        **environ,
        **threads_of(servers),
        "SHOAL_RUN_DIR": str(hosts.folder),
        "SHOAL_SERVER_INDEX": str(index),
        "SHOAL_SERVER_PARENT": str(os.getpid()),
        "SHOAL_SERVER_BEYOND": beyond,
    }
    command = [sys.executable, "-m", "shoal.server.main"]
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
    hosts.processes.append(process)
    if beyond:
        word = address_file(hosts.folder, index)
        deadline_s = time.monotonic() + _START_S
        while not word.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise BadInput(f"server {index} does not listen at {beyond}: see its output")
            time.sleep(0.01)
        beyond = word.read_text()
    return socket_of(hosts.folder, index), beyond


def address_file(run_dir: str | Path, index: int) -> Path:
    """Where a server leaves word of its address for other hosts."""
    return Path(run_dir) / f"server-{index}.address"


def _folder() -> Path:
    """For sockets, whose paths have to be short; only this user can look into it."""
    path = tempfile.mkdtemp(prefix="shoal-ps-")
    if len(path) > _LONGEST_SOCKET_PATH - len("/server-000.sock"):
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix="shoal-ps-", dir="/tmp")
    return Path(path)


def _share_secret(group: Group, replica_group: ReplicaGroup, environ: Mapping[str, str]) -> bytes:
    """Rank 0's: of its launcher, or a fresh one."""
    mine = (read_secret(environ) or fresh_secret()) if group.rank == 0 else b""
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
