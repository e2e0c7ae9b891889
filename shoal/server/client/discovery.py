"""Find the servers of a run, or start them.

placement    servers run in
servers      processes that `shoal run` has started (`RunConfig.servers`); under another launcher
             the first rank of each host starts some, which end with it
rank0        a thread of worker 0
workers      a thread of every worker

Servers listen at Unix sockets. Where workers are on several hosts, servers also listen at a TCP
port, which workers of other hosts use. With copies, those of a shard are on different hosts,
and the first rank of all starts a coordinator unless there is one (SHOAL_COORDINATOR).

The secret of servers that workers start never travels. Every host is given it (SHOAL_SECRET,
SHOAL_SECRET_FILE), or all workers are on one host and know the key of its user (runtime/trust.py).
What workers announce after that has a proof of the
secret, over a nonce of each: announcements of others, or of another run, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.comm import objects
from shoal.comm.executors.hierarchical.topology import Topology, host_id
from shoal.comm.group import Group
from shoal.comm.mesh import ReplicaGroup
from shoal.errors import BadInput, PeerLost, ShoalError
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import RunDir
from shoal.runtime.secret import code_of, fresh_nonce, is_code
from shoal.runtime.trust import key_of_host
from shoal.runtime.variable_text import LaunchedServer
from shoal.runtime.wording import counted
from shoal.server.client.chain_view import CopyAddresses
from shoal.server.client.started import StartedServers
from shoal.server.process.server import Server
from shoal.strategy.ps_term import Ps

_MAX_BYTES = 512
_NEEDS_SECRET = (
    "these workers are on several hosts, and their servers need a secret that every host is "
    "given: set SHOAL_SECRET, or SHOAL_SECRET_FILE, to the same 64 hexadecimal digits on each of "
    "them (openssl rand -hex 32 makes some)"
)


class ServerSet:
    """All servers of a run in order, as one worker reaches them; the first is the leader."""

    def __init__(
        self,
        announcer: Announcer,
        servers: Sequence[LaunchedServer],
        host: str,
        copies: int = 1,
        started: StartedServers | None = None,
        config: RunConfig | None = None,
    ):
        """The worker is on `host`; `started` are the servers that it has started.

        `servers` has the copies of each shard one after the other. A `config` says where copies
        that move are found.
        """
        self.announcer = announcer
        self.secret = announcer.secret
        self.has_replicas = copies > 1
        seen = [server.seen_from(host) for server in servers]
        self.addresses: list[str | Sequence[str]] = [*seen]
        if self.has_replicas:
            starts = range(0, len(seen), copies)
            self.addresses = [CopyAddresses(seen[i : i + copies], i, config) for i in starts]
        self._servers = servers[::copies]
        self._leader = servers[0]
        self._started = started

    @property
    def leaders(self) -> list[str]:
        """The address of the leader, as each server reaches it."""
        return [self._leader.seen_from(server.host) for server in self._servers]

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
        leader = replica_group.broadcast_bytes(self._servers[0].encode().encode(), _MAX_BYTES)
        self._leader = LaunchedServer.decode(leader.decode())

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
    started = StartedServers(met, config)
    try:
        servers = _start(term, group, met, started)
    except BaseException:
        started.close(failed=True)
        raise
    return ServerSet(met.announcer, servers, met.host, term.replicas, started)


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
    named = [replace(each, host=host_id(each.host).decode()) for each in named]
    host = host_id(config.host_id).decode()
    return ServerSet(Announcer(secret), named, host, term.replicas, config=config)


def _start(
    term: Ps, group: Group, met: Introduction, started: StartedServers
) -> list[LaunchedServer]:
    """Start all servers, each on one rank; servers are assigned to hosts in turn."""

    def announced(what: str, starter: int, own: LaunchedServer | None) -> LaunchedServer:
        encoded = b"" if own is None else own.encode().encode()
        told = met.announcer.broadcast(group, f"the address of {what}", encoded, starter)
        return LaunchedServer.decode(told.decode())

    if term.replicas > 1:
        own = started.start_coordinator() if group.rank == 0 else None
        address = announced("the coordinator", 0, own).seen_from(met.host)
        started.config = replace(started.config, coordinator=address)
    is_process = term.placement == "servers"
    count = group.size if term.placement == "workers" else term.servers * term.replicas
    starters = [_starter(term, met.topology, index) for index in range(count)]
    for index, starter in enumerate(starters):
        if is_process and starter == group.rank:
            started.launch(term, index)
    servers = []
    for index, starter in enumerate(starters):
        own = None
        if group.rank == starter:
            own = started.address_of(index) if is_process else started.host(term, index)
        servers.append(announced(f"server {index}", starter, own))
    return servers


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
    gathered = objects.all_gather_bytes(group, text.encode(), _MAX_BYTES)
    return [data.decode() for data in gathered]


# ---- the secret, and what is announced by it -----------------------------------------------------


@dataclass(frozen=True)
class Announcer:
    """Tells all workers of a group something; only who knows the secret can."""

    secret: bytes = field(repr=False)
    words: tuple[bytes, ...] = ()  # what each rank said when they met, with its nonce

    def broadcast(self, group: Group, what: str, data: bytes, root: int = 0) -> bytes:
        """The root's data. Those of another rank, if the root was lost before it told them."""
        claims = (what.encode(), str(root).encode(), *self.words)
        code = code_of(self.secret, "announce", *claims, data).hex().encode()
        received = objects.broadcast_bytes(group, code + b"\n" + data, root, _MAX_BYTES)
        given, _, told = received.partition(b"\n")
        try:
            proof = bytes.fromhex(given.decode("ascii"))
        except ValueError:
            proof = b""
        if not is_code(proof, self.secret, "announce", *claims, told):
            raise ShoalError(
                f"rank {group.rank} was told {what} as if by rank {root}, without the secret of "
                "this run: SHOAL_SECRET differs between hosts, or a stranger is in the network"
            )
        if not told:
            raise PeerLost(group.rank, root, f"waiting for {what}")
        return told


@dataclass(frozen=True)
class Introduction:
    """What a worker knows before servers start."""

    host: str
    topology: Topology
    announcer: Announcer


def introduce(group: Group, replica_group: ReplicaGroup, config: RunConfig) -> Introduction:
    """All ranks call it together. Workers of all shards of a replica have one secret."""
    host = host_id(config.host_id).decode()
    given = config.read_secret()
    if config.run_dir is not None and given is not None:  # one host; some ranks may be missing
        one_host = Topology((tuple(range(group.size)),), group.rank)
        return Introduction(host, one_host, Announcer(given))
    # of each rank: its host, whether it was given the secret, a nonce
    own = f"{host} {'none' if given is None else 'given'} {fresh_nonce().hex()}".encode()
    gathered = objects.all_gather_bytes(group, own, _MAX_BYTES)
    gathered[group.rank] = own
    words = [text.split(b" ") for text in gathered]
    for rank, word in enumerate(words):
        if len(word) != 3:
            raise ShoalError(f"rank {rank} does not say on which host it is")
    topology = Topology.of([word[0] for word in words], group.rank)
    has_secret = [word[1] == b"given" for word in words]
    (of_leader,) = replica_group.broadcast_integers([int(all(has_secret))])
    if any(has_secret) != all(has_secret) or of_leader != all(has_secret):
        raise BadInput(f"some workers have a secret and others have none: {_NEEDS_SECRET}")
    said = tuple(b" ".join(word) for word in words)
    if given is not None:
        return Introduction(host, topology, Announcer(given, said))
    if len(topology.hosts) > 1:
        raise BadInput(_NEEDS_SECRET)
    start = replica_group.broadcast_bytes(said[0], _MAX_BYTES)  # a secret of this start alone
    secret = code_of(key_of_host(config), "servers", start)
    return Introduction(host, topology, Announcer(secret, said))
