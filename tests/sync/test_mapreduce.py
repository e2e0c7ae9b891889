"""A master that broadcasts weights, reduces gradients and updates."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.comm.executors.solo import solo_group
from shoal.errors import BadInput
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World
from tests.jobs import CPU, after_training
from tests.models import convnet, mlp, samples
from tests.splitting import SGD, assert_same, train

ADAM = partial(torch.optim.Adam, lr=1e-2, eps=1e-3)


@pytest.mark.parametrize("options", [{}, {"optimizer": ADAM, "clip_norm": 0.1}, {"accumulate": 2}])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_is_full_batch_gradient_descent(world: World, size: int, options: Any) -> None:
    """103 samples in pieces of 20, five times: five updates, each by the whole gradient."""
    models = [mlp() for _ in range(size)]
    data = samples(103)
    plain = {key: value for key, value in options.items() if key != "accumulate"}
    alone = train(solo_group(), "single", mlp(), data, 103, epochs=5, **plain)
    together = world(
        size, lambda g: train(g, "mapreduce", models[g.rank], data, 20, epochs=5, **options)
    )
    assert_same(together, alone)
    assert len(alone[0]) == 5


def test_batchnorm_sees_the_pieces_at_any_number_of_workers(world: World) -> None:
    models = [convnet() for _ in range(3)]
    data = samples(50, (1, 4, 4))
    alone = train(solo_group(), "mapreduce", convnet(), data, 16, epochs=3)
    assert_same(world(3, lambda g: train(g, "mapreduce", models[g.rank], data, 16, 3)), alone)


class Counted(TensorDataset):
    """Notes how many samples are fetched at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.fetched = [*getattr(self, "fetched", []), len(indices)]
        return [self[i] for i in indices]


def test_no_more_than_a_piece_is_fetched_at_a_time(world: World) -> None:
    data = Counted(*samples(100).tensors)
    after_training(world, 2, "mapreduce", data=data, batch_size=10)
    compared = [8] * 2  # samples, between the ranks
    assert sorted(data.fetched) == [5] * 20 + compared


def test_only_the_master_has_an_optimizer_state_and_each_sends_its_gradients_once(
    world: World,
) -> None:
    def look(job: Job, step: Any, losses: Any) -> tuple[int, float, int]:
        report = job.report()["sync"][0]
        return len(step.update.optimizer.state), report["bytes_per_step"], step.flat.data.nbytes

    options: Any = {"data": samples(40), "batch_size": 20, "optimizer": ADAM}
    found = after_training(world, 3, 'mapreduce(batch="mini")', look, **options)
    num_bytes = found[0][2]
    assert [state for state, _, _ in found] == [6, 0, 0]
    # the master sends weights; rank 1 passes them on and sends gradients; rank 2 gradients alone
    assert [each for _, each, _ in found] == [num_bytes, 2 * num_bytes, num_bytes]


def test_a_checkpoint_continues_the_run(world: World, tmp_path: Path) -> None:
    def save(job: Job, step: Any, losses: list[float]) -> list[float]:
        job.save(tmp_path / "saved")
        return losses

    options: Any = {"data": samples(30), "batch_size": 10, "optimizer": ADAM}
    train = partial(after_training, world, strategy="mapreduce", look=save, **options)
    whole = train(size=1, epochs=4)[0]
    first = train(size=2, epochs=2)[0]
    second = train(size=2, epochs=4, load=tmp_path / "saved")[0]
    assert first + second == pytest.approx(whole, abs=1e-5)


def test_what_needs_a_batch_in_hand_is_refused() -> None:
    job = Job(parse("mapreduce"), solo_group(), device=CPU, seed=3)
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    with pytest.raises(BadInput, match="whole dataset in every step"):
        job.batches([samples(4).tensors])
    with pytest.raises(BadInput, match="a batch is the whole dataset"):
        for x, y in job.batches(samples(20), 10):
            step((x * 2, y))
    counting = job.step(mlp(), F.cross_entropy, optimizer=SGD, count=lambda batch: 1)
    with pytest.raises(BadInput, match="count needs to see"):
        counting(next(job.batches(samples(20), 10)))
