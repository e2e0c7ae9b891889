"""Which members of an etcd cluster there are, and how connections to them are protected."""

from __future__ import annotations

import ssl
from typing import NamedTuple

from shoal.errors import BadInput
from shoal.runtime.config import EtcdConfig
from shoal.runtime.trust import is_loopback

_DEFAULT_PORT = 2379
_FORMS = "use etcd://HOST:PORT,HOST:PORT, or etcds://… for TLS"


class Endpoint(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_etcd(address: str) -> bool:
    return address.startswith(("etcd://", "etcds://"))


def parse_endpoints(address: str) -> list[Endpoint]:
    """`etcd://h1:2379,h2,[::1]:2379`; BadInput names what is wrong."""
    kind, _, text = address.partition("://")
    words = [word.strip() for word in text.rstrip("/").split(",")]
    if kind not in ("etcd", "etcds") or not all(words):
        raise BadInput(f"SHOAL_COORDINATOR is {address!r}: {_FORMS}")
    return [_endpoint(word, address) for word in words]


def _endpoint(word: str, address: str) -> Endpoint:
    host, colon, port = word.rpartition(":")
    if not colon or word.endswith("]"):
        host, port = word, str(_DEFAULT_PORT)
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:9]) < 65536 and len(port) < 6
    host = host[1:-1] if is_bracketed else host
    is_host = bool(host) and not set(host) & set("/@?# []") and (is_bracketed or ":" not in host)
    if not is_port or not is_host:
        raise BadInput(f"SHOAL_COORDINATOR is {address!r}, and {word!r} is no HOST:PORT: {_FORMS}")
    return Endpoint(host, int(port))


def check_trusted(endpoints: list[Endpoint], trusted_network: bool) -> None:
    """What etcd says decides which servers count: it has to come from etcd."""
    for endpoint in endpoints:
        if not trusted_network and not is_loopback(endpoint.host):
            raise BadInput(
                f"what the servers agree on would cross the network to etcd at {endpoint} in the "
                "clear: use etcds:// (with SHOAL_ETCD_CA), or set SHOAL_TRUSTED_NETWORK=1 where "
                "the network is trusted"
            )


def tls_context(config: EtcdConfig) -> ssl.SSLContext:
    """Verifies members by SHOAL_ETCD_CA, and shows SHOAL_ETCD_CERT where etcd asks for one."""
    try:
        context = ssl.create_default_context(cafile=config.authority)
    except OSError as error:
        raise BadInput(f"SHOAL_ETCD_CA {config.authority}: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if config.certificate:
        try:
            context.load_cert_chain(config.certificate, config.key)
        except OSError as error:  # ssl.SSLError is one
            raise BadInput(f"SHOAL_ETCD_CERT {config.certificate}: {error}") from error
    return context
