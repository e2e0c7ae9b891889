"""ps(on="cuda"): servers that keep weights and optimizer on the device of a worker.

Here the device is the CPU, which stands in for one: the weights are not shared with workers, and
pushes and pulls are copied.
"""

from __future__ import annotations

import pytest
import torch

from shoal.comm.executors.solo import solo_group
from shoal.errors import BadInput
from shoal.server.client import started
from shoal.strategy.strategy import parse
from shoal.sync.ps import connect
from shoal.train.job import Job
from tests.conftest import World
from tests.models import mlp, samples
from tests.test_equal import ADAMW, SGD, assert_equal_to_single

CPU = torch.device("cpu")


@pytest.mark.parametrize("placement", ["rank0", "workers"])
def test_servers_on_a_device_equal_one_device(
    world: World, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    for module in (connect, started):
        monkeypatch.setattr(module, "device_of_server", lambda term: CPU)
    strategy = f'ps(placement="{placement}", on="cuda")'
    options = {"optimizer": ADAMW, "clip_norm": 0.1}
    assert_equal_to_single(world, 2, strategy, mlp, samples(50), 12, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a host without CUDA")
def test_a_host_without_cuda_is_one_sentence() -> None:
    job = Job(parse('ps(placement="rank0", on="cuda")'), solo_group(), device=CPU)
    with pytest.raises(BadInput, match="there is no CUDA here"):
        job.step(mlp(), torch.nn.functional.cross_entropy, optimizer=SGD)


def test_server_processes_have_no_gpu_of_a_worker() -> None:
    with pytest.raises(BadInput, match='add placement="rank0"'):
        parse('ps(on="cuda")').layout(2)
