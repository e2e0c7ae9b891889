"""Find the servers of a run, or start them.

placement    servers run in
servers      processes that `shoal run` has started (`RunConfig.servers`); under another launcher
             the first rank of each host starts some, which end with it
rank0        a thread of worker 0
workers      a thread of every worker

Servers listen at Unix sockets. Where workers are on several hosts, servers also listen at a TCP
port, which workers of other hosts use. With copies, those of a shard are on different hosts,
and the first rank of all starts a coordinator unless there is one (SHOAL_COORDINATOR).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.comm import objects
from shoal.comm.executors.hierarchical.topology import Topology, host_id
from shoal.comm.group import Group
from shoal.comm.mesh import ReplicaGroup
from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import RunDir
from shoal.runtime.variables import LaunchedServer
from shoal.runtime.wording import counted
from shoal.server.client.chain_view import CopyAddresses
from shoal.server.client.introduction import Announcer, Introduction, introduce
from shoal.server.client.started import ServerAddress, StartedServers
from shoal.server.process.server import Server
from shoal.strategy.sync_terms.ps import Ps

_MAX_ADDRESS_BYTES = 320


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
        self.addresses: list[str | Sequence[str]] = [s.seen_from(host) for s in servers]
        self._servers = list(servers)
        self._leader = servers[0]
        self._started = started

    @property
    def leaders(self) -> list[str]:
        """The address of the leader, as each server reaches it."""
        return [self._leader.seen_from(server.host) for server in self._servers]

    @property
    def has_replicas(self) -> bool:
        """Whether each server is a chain of copies, with an address each."""
        return any(not isinstance(address, str) for address in self.addresses)

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


def find_or_start_servers(
    term: Ps, group: Group, replica_group: ReplicaGroup, config: RunConfig
) -> ServerSet:
    """All ranks call it together. Servers of all shards of a replica have one secret."""
    if term.placement == "servers" and config.servers is not None:
        return _launched(term, config, config.servers)
    if term.replicas > 1 and replica_group.size > 1:
        raise BadInput(
            f"{term} beside tp or pp is started by `shoal run` only: under torchrun, mpirun or "
            "srun start its servers yourself (python -m shoal.server.main) and name all of them "
            "in SHOAL_SERVERS"
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
        there = f"{'is' if len(addresses) == 1 else 'are'} {len(addresses)}"
        raise BadInput(f"{term} needs {counted(needed, 'server')}, and there {there}")
    named = [LaunchedServer.decode(text) for text in addresses[:needed]]
    host = host_id(config.host_id).decode()
    found = _set_of(term, Announcer(secret), [_address_of(server) for server in named], host)
    if term.replicas > 1:
        found.addresses = [
            CopyAddresses(of_shard, shard * term.replicas, config)
            for shard, of_shard in enumerate(found.addresses)
        ]
    return found


def _address_of(server: LaunchedServer) -> ServerAddress:
    if not server.local:
        return ServerAddress("", server.remote, "")
    return ServerAddress(host_id(server.host).decode(), server.local, server.remote)


def _set_of(
    term: Ps,
    announcer: Announcer,
    servers: Sequence[ServerAddress],
    host: str = "",
    started: StartedServers | None = None,
) -> ServerSet:
    """With copies `servers` has those of each shard one after the other."""
    found = ServerSet(announcer, servers[:: term.replicas], host, started)
    if term.replicas > 1:
        seen = [server.seen_from(host) for server in servers]
        starts = range(0, len(seen), term.replicas)
        found.addresses = [tuple(seen[start : start + term.replicas]) for start in starts]
    return found


def _start(term: Ps, group: Group, met: Introduction, started: StartedServers) -> ServerSet:
    """Start all servers, each on one rank; servers are assigned to hosts in turn."""
    is_for_others = len(met.topology.hosts) > 1
    if term.replicas > 1:
        address = b""
        if group.rank == 0:
            address = started.start_coordinator(met.host, is_for_others).encode()
        told = met.announcer.broadcast(group, "the address of the coordinator", address)
        started.use_coordinator(ServerAddress.decode(told).seen_from(met.host))
    is_process = term.placement == "servers"
    count = group.size if term.placement == "workers" else term.servers * term.replicas
    starters = [_starter(term, met.topology, index) for index in range(count)]
    for index, starter in enumerate(starters):
        if is_process and starter == group.rank:
            started.launch(term, index, is_for_others)
    servers = []
    for index, starter in enumerate(starters):
        encoded = b""
        if group.rank == starter and is_process:
            encoded = started.address_of(index, met.host, is_for_others).encode()
        elif group.rank == starter:
            encoded = started.host(term, index, met.host, is_for_others).encode()
        told = met.announcer.broadcast(group, f"the address of server {index}", encoded, starter)
        servers.append(ServerAddress.decode(told))
    return _set_of(term, met.announcer, servers, met.host, started)


def _starter(term: Ps, topology: Topology, index: int) -> int:
    """The rank that starts process `index`; copies of a shard are on different hosts."""
    if term.placement == "workers":
        return index
    if term.placement == "servers":
        shard, replica = divmod(index, term.replicas)
        return topology.hosts[(shard + replica) % len(topology.hosts)][0]
    return 0


def all_gather_text(group: Group, text: str) -> list[str]:
    """The text of every rank, by rank."""
    gathered = objects.all_gather_bytes(group, text.encode(), _MAX_ADDRESS_BYTES)
    return [data.decode() for data in gathered]
