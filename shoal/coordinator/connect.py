"""The coordinator that a configuration names."""

from __future__ import annotations

from shoal.coordinator.client import CALL_S, RemoteCoordinator
from shoal.coordinator.etcd.coordinator import ETCD_CALL_S, EtcdCoordinator
from shoal.coordinator.etcd.gateway import RunKeys, check_trusted, is_etcd, parse_endpoints
from shoal.coordinator.interface import Coordinator
from shoal.errors import BadInput
from shoal.protocol.endpoint import client_context
from shoal.runtime.config import RunConfig
from shoal.runtime.variable_text import MIN_LEASE_S

LEASE_TTL_S = MIN_LEASE_S  # of servers, with the launcher's coordinator
ETCD_LEASE_TTL_S = 2.0  # the shortest that etcd grants


def open_coordinator(
    config: RunConfig, who: str = "this process", call_s: float | None = None
) -> Coordinator:
    """A client of `config.coordinator`; `who` asks, for errors. It connects when it is used."""
    address = config.coordinator
    if address is None:
        raise BadInput("there is no coordinator: SHOAL_COORDINATOR is not set")
    secret = config.read_secret()
    if secret is None:
        raise BadInput("the coordinator needs the secret of this run: set SHOAL_SECRET")
    if is_etcd(address):
        return open_etcd(config, address, secret, who, call_s or ETCD_CALL_S)
    return RemoteCoordinator(address, secret, who, config.tls, call_s or CALL_S)


def open_etcd(
    config: RunConfig, address: str, secret: bytes, who: str, call_s: float = ETCD_CALL_S
) -> EtcdCoordinator:
    endpoints = parse_endpoints(address)
    context = client_context(config.etcd, "SHOAL_ETCD") if address.startswith("etcds:") else None
    if context is None:
        check_trusted(endpoints, config.tls.trusted_network)
    return EtcdCoordinator(endpoints, RunKeys.of_secret(secret), who, context, call_s)


def lease_ttl_s(config: RunConfig) -> float:
    """How long a server's lease lasts without being renewed."""
    least_s = ETCD_LEASE_TTL_S if is_etcd(config.coordinator or "") else LEASE_TTL_S
    return max(least_s, config.lease_s or 0.0)
