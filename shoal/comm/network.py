"""How ranks of several hosts reach each other: which transport, where it listens, who may connect.

SHOAL_HOST            the name or address of this host; default: the one that reaches MASTER_ADDR
SHOAL_RACK            the rack of a host, by any name; `--on lab` gives it to its hosts
SHOAL_HOSTS_PER_RACK  hosts fill racks in their order; `shoal run --cluster FILE` sets it
SHOAL_HOST_ORDER      names of hosts in the order of the ring; default: the order of their ranks
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from shoal.comm.executors.hierarchical.topology import Topology, host_id
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.transport.shm.memfd import Exchange
from shoal.comm.transport.shm.segment import NOT_BUILT, is_built, join
from shoal.errors import BadInput
from shoal.runtime.config import RunConfig, TlsConfig, variable_name
from shoal.runtime.decoders import decode_json
from shoal.runtime.memory_limit import cores
from shoal.runtime.run_dir import RunDir
from shoal.runtime.secret import code_of, fresh_nonce
from shoal.runtime.trust import is_loopback, key_of_host, require_protected

if TYPE_CHECKING:
    from shoal.comm.executors.hierarchical.executor import Hierarchical
    from shoal.comm.transport.tcp.transport import TcpEngine


LOOPBACK = "127.0.0.1"
_CONNECT_S = 120.0
_ANY_PORT = 9  # nothing is sent: the kernel chooses the interface


@dataclass(frozen=True)
class HostNetwork:
    """What a rank knows of its host and of the network.

    The default is one where all are reached at loopback.
    """

    config: RunConfig = field(default_factory=RunConfig)
    is_one_host: bool = False
    master: str | None = None  # a host that all ranks reach

    @property
    def address(self) -> str:
        """Where this rank listens."""
        if self.is_one_host:
            return LOOPBACK
        if self.config.hostname or not self.master:
            return self.config.hostname or LOOPBACK
        return _address_towards(self.master)

    @property
    def is_local(self) -> bool:
        return is_loopback(self.address)

    def key(self, rank: int) -> bytes:
        """The secret of the run; BadInput where strangers could reach a rank and there is none."""
        if self.is_local:
            return key_of_host(self.config)
        return require_protected(self.config, "the data plane", says=rank == 0) or b""

    def require_native(self) -> None:
        """BadInput where this host cannot reach others."""
        if not is_built():
            raise BadInput(
                f"several hosts are joined over TCP by the native part, and {NOT_BUILT}: install "
                "a C compiler on every host, and then Shoal"
            )

    @property
    def tls(self) -> TlsConfig:
        return TlsConfig() if self.is_local else self.config.tls


def share_on_hosts(
    topology: Topology, exchange: Exchange, timeout_s: float, run_dir: RunDir | None = None,
    explains: bool = True,
) -> SharedMemory | None:  # fmt: skip
    """The ranks of this host; None on all ranks where those of one host cannot share memory."""

    def exchange_on_host(message: bytes) -> list[bytes]:
        """All ranks call it at once, each for its own host."""
        said = exchange(message)
        return [said[peer] for peer in topology.local]

    num_local = len(topology.local)
    segment = join(
        exchange_on_host, topology.index, num_local, timeout_s, run_dir=run_dir, explains=explains
    )
    answers = exchange(b"no" if segment is None else b"yes") if len(topology.hosts) > 1 else ()
    if segment is None:
        return None
    local = SharedMemory(segment, num_local * torch.get_num_threads() >= cores())
    if b"no" in answers:
        local.close()
        return None
    return local


def join_hosts(
    topology: Topology,
    local: SharedMemory,
    exchange: Exchange,
    timeout_s: float,
    network: HostNetwork,
    check: Callable[[], None] = lambda: None,
    tell: Callable[[TcpEngine | None], None] = lambda engine: None,
) -> SharedMemory | Hierarchical:
    """TCP between hosts, where there are several; all ranks call it.

    `check` as in `open_engine`. `tell` gets the engine, and None before it is closed on an error.
    """
    if len(topology.hosts) == 1:
        return local

    from shoal.comm.executors.hierarchical.executor import Hierarchical
    from shoal.comm.executors.hierarchical.tcp_links import TcpLinks

    executor: SharedMemory | Hierarchical = local
    try:
        engine = open_engine(topology, exchange, timeout_s, network, check)
        executor = Hierarchical(topology, local, TcpLinks(engine, topology, timeout_s), timeout_s)
        tell(engine)
        check()  # what was lost before the engine was known
    except BaseException:
        tell(None)
        executor.close()
        raise
    return executor


def open_engine(
    topology: Topology, exchange: Exchange, timeout_s: float, network: HostNetwork,
    check: Callable[[], None] = lambda: None,
) -> TcpEngine:  # fmt: skip
    """TCP connections between all ranks of different hosts; all ranks call it.

    `check` is called while it waits, and raises where others are not waited for any more.
    """
    key = network.key(topology.rank)
    drawn = exchange(fresh_nonce().hex().encode())

    from shoal.comm.transport.tcp.connect import TcpSpec
    from shoal.comm.transport.tcp.transport import TcpEngine

    spec = TcpSpec(
        topology.rank,
        topology.size,
        code_of(key, "data plane", *drawn),
        host=network.address,
        peers=[r for ranks in topology.hosts if topology.rank not in ranks for r in ranks],
        tls=network.tls,
        timeout_s=min(timeout_s, _CONNECT_S),
        check=check,
    )
    return TcpEngine(spec, exchange)


def _address_towards(host: str) -> str:
    """The address of the interface over which this host reaches another one."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(target)
            return str(sock.getsockname()[0])
    except OSError as error:
        raise BadInput(
            f"this host does not reach MASTER_ADDR {host} ({error.strerror}): SHOAL_HOST can name "
            "the address at which others reach this one"
        ) from error


def hosts_of(network: HostNetwork, exchange: Exchange, rank: int) -> Topology:
    """Which ranks share a host, and hosts in the order of the ring; all ranks call it."""
    topology = Topology.of(exchange(host_id(network.config.host_id)), rank)
    return topology if len(topology.hosts) == 1 else in_ring_order(topology, network, exchange)


def in_ring_order(topology: Topology, network: HostNetwork, exchange: Exchange) -> Topology:
    """Hosts in order, racks one after the other; all ranks call it.

    Racks go by name where all hosts have one, else by the order of the hosts.
    """
    config = network.config
    own = [
        config.hostname or socket.gethostname(),
        " ".join((config.rack or "").split()),
        config.hosts_per_rack or 0,
        list(config.host_order),
    ]
    said = [decode_json(text, list) for text in exchange(json.dumps(own).encode())]
    for at, name in ((2, "hosts_per_rack"), (3, "host_order")):
        if any(words[at] != own[at] for words in said):
            raise BadInput(f"{variable_name(name)} differs between ranks: give all the same")
    of_hosts = [said[ranks[0]] for ranks in topology.hosts]
    order = config.host_order
    places = [order.index(words[0]) if words[0] in order else len(order) for words in of_hosts]
    hosts = sorted(range(len(of_hosts)), key=places.__getitem__)
    is_named = all(words[1] for words in of_hosts)
    each = config.hosts_per_rack or len(hosts)
    racks = {h: of_hosts[h][1] if is_named else place // each for place, h in enumerate(hosts)}
    numbers = {rack: number for number, rack in enumerate(dict.fromkeys(racks.values()))}
    hosts.sort(key=lambda host: numbers[racks[host]])
    return replace(
        topology,
        hosts=tuple(topology.hosts[host] for host in hosts),
        racks=tuple(numbers[racks[host]] for host in hosts) if len(numbers) > 1 else (),
    )
