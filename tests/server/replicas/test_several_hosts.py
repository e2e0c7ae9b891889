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
