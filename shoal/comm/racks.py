"""The order of hosts, so that a ring enters and leaves each rack once, and which rack each is in.

SHOAL_RACK            the rack of a host, by any name; `--on lab` gives it to its hosts
SHOAL_HOSTS_PER_RACK  hosts fill racks in their order; `shoal run --cluster FILE` sets it
SHOAL_HOST_ORDER      names of hosts in the order of the ring; default: the order of their ranks
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shoal.comm.executors.hierarchical.topology import Topology
from shoal.comm.network import HostNetwork
from shoal.errors import BadInput
from shoal.runtime.config import variable_name
from shoal.transport.shm.memfd import Exchange


class _HostWords(NamedTuple):
    """What a rank says about its host."""

    name: str
    rack: str
    hosts_per_rack: int
    order: str


def in_ring_order(topology: Topology, network: HostNetwork, exchange: Exchange) -> Topology:
    """Hosts in order, racks one after the other; all ranks call it."""
    order = ",".join(network.host_order)
    rack = " ".join(network.rack.split())
    own = (network.host_name, rack, str(network.hosts_per_rack), order)
    said = [_read(text) for text in exchange("\n".join(own).encode())]
    for name, texts in (
        (variable_name("host_order"), {words.order for words in said}),
        (variable_name("hosts_per_rack"), {str(words.hosts_per_rack) for words in said}),
    ):
        if len(texts) > 1:
            raise BadInput(f"{name} differs between ranks: give all of them the same")
    return ordered(topology, [said[ranks[0]] for ranks in topology.hosts], network.host_order)


def ordered(topology: Topology, hosts: list[_HostWords], order: tuple[str, ...] = ()) -> Topology:
    """`hosts` has what is known of each host of the topology."""
    names = [words.name for words in hosts]
    places = [order.index(name) if name in order else len(order) for name in names]
    by_place = sorted(range(len(hosts)), key=places.__getitem__)
    racks = _racks([hosts[host] for host in by_place])
    numbers = {rack: number for number, rack in enumerate(dict.fromkeys(racks))}
    found = sorted(zip(by_place, racks, strict=True), key=lambda pair: numbers[pair[1]])
    is_known = len(numbers) > 1
    return replace(
        topology,
        hosts=tuple(topology.hosts[host] for host, _ in found),
        racks=tuple(numbers[rack] for _, rack in found) if is_known else (),
    )


def _racks(hosts: list[_HostWords]) -> list[str]:
    """By name where all hosts have one, else by their order."""
    if all(words.rack for words in hosts):
        return [words.rack for words in hosts]
    each = hosts[0].hosts_per_rack or len(hosts)
    return [str(place // each) for place in range(len(hosts))]


def _read(text: bytes) -> _HostWords:
    name, rack, each, order = text.decode(errors="replace").split("\n")
    return _HostWords(name, rack, int(each), order)
