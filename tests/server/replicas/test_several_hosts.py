"""A run over two hosts under TLS whose servers have replicas, started by torchrun on each."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cluster import Cluster, finish, free_port
from tests.namespaces import two_hosts, why_not

pytestmark = [
    pytest.mark.whole,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl"),
]


def test_copies_on_two_hosts_give_the_weights_of_single_servers(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as hosts:
        cluster = Cluster(hosts, tmp_path)
        weights = []
        for strategy in ("ps(servers=2)", "ps(servers=2, replicas=2)"):
            ended = finish(cluster.start(free_port(hosts[0]), strategy))
            assert ended.statuses == (0, 0), ended.output[-3000:]
            assert len(ended.weights) == 1, ended.output[-3000:]
            weights.append(ended.weights)
        assert weights[0] == weights[1]


@pytest.mark.parametrize("rule", ["staleness=2", 'mode="async"', "quorum=2"])
def test_relaxed_rules_pull_from_copies_on_two_hosts(tmp_path: Path, rule: str) -> None:
    """No worker shares memory with all copies, so pulls come over sockets from any of them."""
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as hosts:
        cluster = Cluster(hosts, tmp_path)
        for consistency in ("strong", "eventual"):
            strategy = f'ps({rule}, servers=2, replicas=2, consistency="{consistency}")'
            ended = finish(cluster.start(free_port(hosts[0]), strategy))
            assert ended.statuses == (0, 0), ended.output[-3000:]
            assert len(ended.losses) == 2, ended.output[-3000:]
            assert all(last < 0.6 * first for first, last in ended.losses), ended.output[-3000:]
