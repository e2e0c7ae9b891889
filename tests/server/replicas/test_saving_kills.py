"""kill -9 of a head at every named point of a checkpoint that it writes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from shoal.runtime.checkpoint_folders import shard_name, version_of
from shoal.runtime.config import ServerCheckpointConfig
from shoal.server.process.shard_file import read_shard
from tests.coordinator.helpers import until
from tests.server.helpers import MODEL
from tests.server.replicas.processes import processes
from tests.server.replicas.world import pulled, push_one_hot

LEASE_S = 2.0


@pytest.mark.whole
@pytest.mark.parametrize("point", ["begin", "temporary", "fsync", "rename"])
def test_the_checkpoint_before_stays_and_the_next_head_writes_the_next_one(
    tmp_path: Path, point: str
) -> None:
    folder = tmp_path / "saved"
    armed = {0: f"snapshot.{point}:kill@2"}
    checkpoint = ServerCheckpointConfig(folder)

    def file(number: int) -> Path:
        return version_of(folder, number, MODEL).path / shard_name(0, 1)

    with processes(tmp_path, 3, armed, LEASE_S, checkpoint) as made:
        client = made.client()
        push_one_hot(client, 0, 0, save=1)
        until(file(1).exists, "the first checkpoint")
        push_one_hot(client, 1, 1, save=2)
        assert made.wait_dead(0) == -signal.SIGKILL
        for number in (1, 2):
            if file(number).exists():
                assert torch.count_nonzero(read_shard(file(number)).weights) == number
        push_one_hot(client, 2, 2)
        assert file(2).exists() == (point == "rename")
        push_one_hot(client, 3, 3, save=4)  # its writer removes what was never complete
        until(file(4).exists, "the one of the next head")
        assert pulled(client)[:5] == [-1.0] * 4 + [0.0]
        client.close()
    assert torch.count_nonzero(read_shard(file(4)).weights) == 4
