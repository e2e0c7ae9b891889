"""The coordinator that a configuration names."""

from __future__ import annotations

from shoal.coordinator.client import CALL_S, RemoteCoordinator
from shoal.coordinator.interface import Coordinator
from shoal.errors import BadInput
from shoal.runtime.config import RunConfig

LEASE_TTL_S = 0.5  # of servers, with the launcher's coordinator
ETCD_LEASE_TTL_S = 2.0  # the shortest that etcd grants


def open_coordinator(
    config: RunConfig, who: str = "this process", call_s: float = CALL_S
) -> Coordinator:
    """A client of `config.coordinator`; `who` asks, for errors. It connects when it is used."""
    address = config.coordinator
    if address is None:
        raise BadInput("there is no coordinator: SHOAL_COORDINATOR is not set")
    secret = config.read_secret()
    if secret is None:
        raise BadInput("the coordinator needs the secret of this run: set SHOAL_SECRET")
    return RemoteCoordinator(address, secret, who, config.tls, call_s)


def lease_ttl_s(config: RunConfig) -> float:
    """How long a server's lease lasts without being renewed."""
    is_etcd = (config.coordinator or "").startswith("etcd")
    return ETCD_LEASE_TTL_S if is_etcd else LEASE_TTL_S
