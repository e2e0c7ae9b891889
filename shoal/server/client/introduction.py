"""How workers that start servers come to have one secret, and know each other's servers by it.

The secret never travels. Every host is given it (SHOAL_SECRET, SHOAL_SECRET_FILE), or all workers
are on one host: then the first one writes it to a file that only this user can read, and tells
the others where. What workers announce after that has a proof of the secret, over a nonce of
each: announcements of others, or of another run, are refused.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from shoal.comm import objects
from shoal.comm.executors.hierarchical.topology import Topology, host_id
from shoal.comm.group import Group
from shoal.comm.mesh import ReplicaGroup
from shoal.errors import BadInput, PeerLost, ShoalError
from shoal.runtime.config import RunConfig
from shoal.runtime.greeting import code_of, fresh_nonce, is_code
from shoal.runtime.run_dir import RunDir, new_server_dir
from shoal.runtime.secret import new_secret

_MAX_BYTES = 512
_NEEDS_SECRET = (
    "these workers are on several hosts, and their servers need a secret that every host is "
    "given: set SHOAL_SECRET, or SHOAL_SECRET_FILE, to the same 64 hexadecimal digits on each of "
    "them (openssl rand -hex 32 makes some)"
)


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
        if not is_code(_unhex(given), self.secret, "announce", *claims, told):
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
    secret_dir: RunDir | None = None  # where this worker has written the secret


def introduce(group: Group, replica_group: ReplicaGroup, config: RunConfig) -> Introduction:
    """All ranks call it together. Workers of all shards of a replica have one secret."""
    host = host_id(config.host_id).decode()
    given = config.read_secret()
    if config.run_dir is not None and given is not None:  # one host; some ranks may be missing
        return Introduction(host, _one_host(group), Announcer(given))
    words = _meet(group, host, given is not None)
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
    secret, secret_dir = _secret_of_host(group, replica_group)
    return Introduction(host, topology, Announcer(secret, said), secret_dir)


def _one_host(group: Group) -> Topology:
    return Topology((tuple(range(group.size)),), group.rank)


def _meet(group: Group, host: str, has_secret: bool) -> list[list[bytes]]:
    """Of each rank: its host, whether it was given the secret, a nonce."""
    own = f"{host} {'given' if has_secret else 'none'} {fresh_nonce().hex()}".encode()
    gathered = objects.all_gather_bytes(group, own, _MAX_BYTES)
    gathered[group.rank] = own
    words = [text.split(b" ") for text in gathered]
    for rank, word in enumerate(words):
        if len(word) != 3:
            raise ShoalError(f"rank {rank} does not say on which host it is")
    return words


def _secret_of_host(group: Group, replica_group: ReplicaGroup) -> tuple[bytes, RunDir | None]:
    """The secret in a file of the first worker; a path is all that it tells the others."""
    secret_dir = None
    if group.rank == 0 and replica_group.is_leader:
        secret_dir = new_server_dir()
    try:
        path = b""
        if secret_dir is not None:
            secret_dir.write_secret(new_secret())
            path = os.fsencode(secret_dir.path)
        path = objects.broadcast_bytes(group, path, 0, _MAX_BYTES)
        path = replica_group.broadcast_bytes(path, _MAX_BYTES)
        secret = RunDir(Path(os.fsdecode(path))).read_secret()
        if secret is None:
            raise BadInput(_NEEDS_SECRET)
    except BaseException:
        if secret_dir is not None:
            secret_dir.remove()
        raise
    return secret, secret_dir


def _unhex(text: bytes) -> bytes:
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return b""
