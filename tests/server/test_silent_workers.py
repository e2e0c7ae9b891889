"""A worker that is there and does nothing: after the limit of the run its peers lose it."""

from __future__ import annotations

import pytest

from shoal.errors import PeerLost
from shoal.runtime.config import WaitConfig
from shoal.runtime.waits import Watcher
from shoal.server.client.link import ServerLink
from shoal.server.consistency import Rule
from tests.server.helpers import client_of, fill, servers

LIMITED = WaitConfig(notice_s=1e6, limit_s=0.1)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker waits for its server longer than any test runs: the server is what gives up."""
    monkeypatch.setattr("shoal.server.client.link.PATIENCE", 1e6)


@pytest.mark.parametrize("waits_in", ["PULL", "BARRIER"])
def test_a_wait_that_misses_a_worker_names_it(patient: None, waits_in: str) -> None:
    with servers(1) as found, Watcher(LIMITED):
        client = client_of(found, 0, Rule(2))
        client_of(found, 1, Rule(2))
        client.commit(*fill(client, 1.0))
        with pytest.raises(PeerLost, match=f"rank 0 lost rank 1 in {waits_in} to server 0"):
            client.barrier() if waits_in == "BARRIER" else client.pull(1, 1).wait()


@pytest.mark.parametrize("tcp", [False, True])
def test_a_server_that_does_not_answer_is_named(tcp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shoal.server.client.link.PATIENCE", 0.5
    )  # the server keeps its silence longer
    with servers(1, tcp=tcp) as found:
        client = client_of(found, 0, Rule(2))
        client_of(found, 1, Rule(2))
        link: ServerLink = client.links[0]
        with (
            Watcher(LIMITED),
            found[0].models[7].lock,  # its threads are all held up
            pytest.raises(PeerLost, match=r"after .* s in PULL to server 0 \(no answer\)"),
        ):
            client.pull(1, 1).wait()
        with pytest.raises(PeerLost, match="PULL to server 0"):
            client.pull(1, 1).wait()
        assert link.rank == 0
