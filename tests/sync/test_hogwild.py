"""Workers that update one copy of the weights, without locks."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.strategy.strategy import parse
from shoal.sync.hogwild import HogwildSync
from shoal.train.job import Job
from tests.conftest import World
from tests.jobs import after_training
from tests.models import convnet, mlp, samples
from tests.seeds import seeded

SGD = partial(torch.optim.SGD, lr=0.1)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.1)


def job_of(group: Group, strategy: str = "hogwild") -> Job:
    return Job(parse(strategy), group, device=torch.device("cpu"), seed=3)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD])
def test_workers_one_by_one_make_the_updates_of_one_worker(world: World, optimizer: Any) -> None:
    """48 samples in batches of 8: worker 0 takes batches 0, 2 and 4, worker 1 the others."""
    models = [mlp(), mlp()]

    def body(group: Group) -> tuple[list[float], list[Tensor], int]:
        job = job_of(group)
        step = job.step(models[group.rank], F.cross_entropy, optimizer=optimizer)
        losses = []
        for batch in job.batches(samples(48), 8):
            for rank in range(group.size):  # rank 0 makes its step before rank 1 begins
                if group.rank == rank:
                    losses.append(float(step(batch)))
                group.barrier().wait()
        return losses, [p.detach().clone() for p in step.model.parameters()], job.steps

    first, second = world(2, body)

    alone = job_of(solo_group(), "single")
    step = alone.step(mlp(), F.cross_entropy, optimizer=optimizer)
    losses = [float(step(batch)) for batch in alone.batches(samples(48), 8)]
    assert first[0] == losses[0::2]
    assert second[0] == losses[1::2]
    assert first[2] == second[2] == alone.steps == 6
    for mine, theirs, expected in zip(first[1], second[1], step.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine, expected)


def test_a_batch_that_is_left_over_is_shared_and_its_loss_is_a_mean(world: World) -> None:
    data = samples(24)
    x, y = data.tensors
    options: Any = {"data": data, "batch_size": 8, "shuffle": False}
    found = after_training(world, 2, "hogwild", optimizer=partial(SGD, lr=1e-9), **options)
    for rank, losses in enumerate(found):
        own = [slice(8 * rank, 8 * rank + 8), slice(16 + 4 * rank, 20 + 4 * rank)]
        expected = [float(F.cross_entropy(mlp()(x[rows]), y[rows]).detach()) for rows in own]
        assert losses == pytest.approx(expected, abs=1e-5)


def test_the_weights_of_all_workers_are_the_same_memory(world: World) -> None:
    def look(job: Job, step: Any, losses: Any) -> float:
        statistics = step.model[1].running_mean
        job.barrier()
        if job.rank == 0:
            step.flat.data.fill_(7.0)
            statistics.fill_(5.0)
        job.barrier()
        return float(step.flat.params[0].detach().flatten()[0]) + float(statistics[0])

    options: Any = {"make": convnet, "data": samples(32, (1, 4, 4))}
    assert after_training(world, 2, "hogwild", look, **options) == [12.0, 12.0]


@seeded(0)
def rows() -> nn.Module:
    """Each sample names two rows of a table."""
    table = nn.Embedding(50, 4, sparse=True)
    return nn.Sequential(table, nn.Flatten(), nn.Linear(8, 1), nn.Flatten(0))


def test_sparse_gradients_write_the_rows_that_they_name_and_no_others(world: World) -> None:
    ids = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    data = TensorDataset(ids, torch.tensor([0.0, 1.0, 1.0, 0.0]))
    models = [rows(), rows()]

    def body(group: Group) -> Tensor:
        job = job_of(group)
        loss = F.binary_cross_entropy_with_logits
        step = job.step(models[group.rank], loss, optimizer=ADAGRAD)
        for batch in job.batches(data, 4, shuffle=False):
            if group.rank == 1:  # the second half: rows 5 to 8
                step(batch)
        group.barrier().wait()
        return step.model[0].weight.detach().clone()

    for weight in world(2, body):
        changed = (weight != rows()[0].weight).any(dim=1).nonzero().flatten().tolist()
        assert changed == [5, 6, 7, 8]


@pytest.mark.parametrize("strategy", ["hogwild", "hogwild(momentum=True)"])
def test_momentum_is_off_by_default(world: World, capsys: Any, strategy: str) -> None:
    kept = "momentum=True" in strategy
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)

    def look(job: Job, step: Any, losses: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        groups = step.update.optimizer.param_groups
        during = dict(groups[0])
        with step.sync.full_weights(optimizer=True):  # as a checkpoint sees it
            return during, dict(groups[0])

    for during, saved in after_training(world, 2, strategy, look, optimizer=sgd):
        assert during["momentum"] == (0.9 if kept else 0.0)
        assert during["nesterov"] is kept
        assert (saved["momentum"], saved["nesterov"]) == (0.9, True)
    assert ("sets momentum=0.9 to 0" in capsys.readouterr().err) is not kept


def test_adam_needs_momentum(world: World) -> None:
    adam = partial(torch.optim.AdamW, lr=0.01)
    with pytest.raises(BadInput, match="AdamW has no form without it"):
        after_training(world, 2, "hogwild", optimizer=adam)
    after_training(world, 2, "hogwild(momentum=True)", optimizer=adam)


def test_the_learning_rate_is_that_of_the_batch(world: World) -> None:
    asked: dict[int, list[int]] = {}

    def lr(step: int) -> float:
        asked.setdefault(threading.get_ident(), []).append(step)
        return 0.1

    after_training(world, 2, "hogwild", data=samples(56), batch_size=8, lr=lr)
    assert list(asked.values()) == [[0, 2, 4, 6]] * 2  # the seventh batch is shared


def test_evaluating_waits_for_workers_that_are_behind(world: World) -> None:
    data = samples(60)

    def look(job: Job, step: Any, losses: Any) -> tuple[int, float]:
        sync = step.sync
        assert isinstance(sync, HogwildSync)
        with sync.full_weights():
            steps = int(sync.shared_steps.min())
        return steps, job.evaluate(F.cross_entropy, data)

    found = after_training(world, 3, "hogwild", look, data=data, batch_size=12, epochs=2)
    assert [steps for steps, _ in found] == [6, 6, 6]  # 2 epochs of 1 batch each and 2 parts
    assert len({loss for _, loss in found}) == 1
    before = F.cross_entropy(mlp()(data.tensors[0]), data.tensors[1]).detach()
    assert found[0][1] < float(before)


def test_a_checkpoint_loads_into_the_shared_weights_and_sums(world: World, tmp_path: Path) -> None:
    def train(job: Job, step: Any, losses: Any) -> list[Tensor]:
        job.save(tmp_path / "saved")
        job.barrier()
        return state_of(step)

    def go_on(job: Job, step: Any, losses: Any) -> tuple[list[Tensor], int]:
        found = state_of(step)
        job.barrier()
        step.update.optimizer.state[step.flat.params[0]]["sum"].add_(job.rank)
        job.barrier()
        return found, round(float(state_of(step)[-1].flatten()[0] - found[-1].flatten()[0]))

    def state_of(step: Any) -> list[Tensor]:
        sums = step.update.optimizer.state[step.flat.params[0]]["sum"]
        return [*(p.detach().clone() for p in step.model.parameters()), sums.clone()]

    after = partial(after_training, world, 2, "hogwild", optimizer=ADAGRAD, batch_size=8)
    saved = after(train, data=samples(24))[0]
    for found, added in after(
        go_on, data=samples(24), make=lambda: mlp(1), load=tmp_path / "saved"
    ):
        assert added == 1  # what the other rank has added is seen here
        for tensor, expected in zip(found, saved, strict=True):
            assert torch.equal(tensor, expected)


def test_alone_it_is_single(world: World) -> None:
    one, other = (
        after_training(world, 1, strategy, optimizer=partial(SGD, momentum=0.9))
        for strategy in ("hogwild", "single")
    )
    assert one == other
