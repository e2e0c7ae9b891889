"""Runs over two hosts (network namespaces) equal one device, and let no stranger in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from shoal.comm.transport.tcp.transport import is_built
from tests.cluster import Cluster, Ended, finish, free_port
from tests.namespaces import two_hosts, why_not

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(not is_built(), reason="the native part is not built"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
WITHOUT_TLS = {f"SHOAL_TLS_{name}": "" for name in ("CERT", "KEY", "CA")}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with two_hosts() as hosts:
        yield Cluster(hosts, tmp_path_factory.mktemp("hosts"))


def run(cluster: Cluster, strategy: str, per_host: int, **variables: str) -> Ended:
    port = free_port(cluster.hosts[0])
    return finish(cluster.start(port, strategy, per_host, **{**WITHOUT_TLS, **variables}))


@pytest.mark.parametrize(
    ("strategy", "per_host"),
    [("ddp", 1), ("ddp", 2), ('ddp(algorithm="tree")', 1), ("ps(servers=2)", 1)],
)
def test_a_strategy_over_two_hosts_equals_one_device(
    cluster: Cluster, strategy: str, per_host: int
) -> None:
    """With a key alone, but for ps, whose servers ask for TLS or for a trusted network."""
    ran = subprocess.run([sys.executable, cluster.script], capture_output=True, text=True)
    trusted = "1" if strategy.startswith("ps") else "0"
    ended = run(cluster, strategy, per_host, SHOAL_TRUSTED_NETWORK=trusted)
    assert ended.statuses == (0, 0), ended.output[-3000:]
    (alone,) = Ended((0,), ran.stdout).losses
    for losses in ended.losses:
        assert losses == pytest.approx(alone, abs=2e-3)
    assert len(ended.losses) == 2 * per_host


def test_asynchronous_gossip_averages_pairs_over_tls(cluster: Cluster) -> None:
    port = free_port(cluster.hosts[0])
    ended = finish(cluster.start(port, 'gossip(mode="async")', 2, SHOAL_TRUSTED_NETWORK="0"))
    assert ended.statuses == (0, 0), ended.output[-3000:]
    assert len(ended.losses) == 4 and all(last < first for first, last in ended.losses)


def test_without_a_key_nothing_starts_but_in_a_trusted_network(cluster: Cluster) -> None:
    none = {"SHOAL_SECRET": "", "XDG_CONFIG_HOME": "/nonexistent"}
    ended = run(cluster, "ddp", 1, SHOAL_TRUSTED_NETWORK="1", **none)
    assert ended.statuses == (0, 0) and "lets in every process that reaches it" in ended.output
    ended = run(cluster, "ddp", 1, SHOAL_TRUSTED_NETWORK="0", **none)
    assert "shoal keys" in ended.output and not ended.losses
