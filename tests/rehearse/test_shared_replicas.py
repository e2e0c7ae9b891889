"""Virtual workers under ddp have one copy of weights and optimizer state between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.rehearse.shared_replicas import SharedReplicas
from shoal.rehearse.world import Rehearsed, Train
from shoal.replica.flat_params import FlatParams
from shoal.schedules.buffer_layout import LARGE_BYTES, SHARED_BYTES
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.models import samples
from tests.rehearse.worlds import rehearsed

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)
DATA = samples(48)
WIDE = LARGE_BYTES // 4 // 8  # of a layer whose gradient is large
Between = Callable[[Job, Step], Any]


def net() -> nn.Module:
    inputs = DATA[0][0].numel()
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, WIDE), nn.Linear(WIDE, 4))


def training(optimizer: Any = SGD, between: Between | None = None, **options: Any) -> Train:
    """Returns the weights, and how many tensors the optimizer of the worker keeps."""

    def train(job: Job) -> tuple[Tensor, int]:
        step = job.step(net(), F.cross_entropy, optimizer=optimizer, **options)
        for batch in job.batches(DATA, batch_size=16, epochs=2):
            job.log(loss=step(batch))
            if between is not None:
                between(job, step)
        return step.flat.data.clone(), len(step.update.optimizer.state)

    return train


def apart(
    monkeypatch: pytest.MonkeyPatch, train: Train, workers: int, strategy: str = "ddp"
) -> Rehearsed:
    with monkeypatch.context() as patch:
        patch.setattr(SharedReplicas, "join", lambda *_: None)
        return rehearsed(train, strategy, workers)


def assert_same(one: Rehearsed, other: Rehearsed) -> None:
    assert [r["losses"] for r in one.reports] == [r["losses"] for r in other.reports]
    assert one.seconds == other.seconds
    for (mine, _), (theirs, _) in zip(one.results, other.results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.01}, {"exact": True, "microbatches": 4}])
@pytest.mark.parametrize("optimizer", [SGD, ADAM])
def test_they_have_the_bits_and_seconds_of_workers_apart(
    monkeypatch: pytest.MonkeyPatch, optimizer: Any, options: dict[str, Any]
) -> None:
    train = training(optimizer, **options)
    shared = rehearsed(train, "ddp", 4)
    assert_same(shared, apart(monkeypatch, train, 4))
    assert [kept for _, kept in shared.results] == [0] * 4  # the state is theirs together


def shrink(job: Job, step: Step) -> None:
    with torch.no_grad():
        for p in step.model.parameters():
            p.mul_(0.9)


def disturb_one(job: Job, step: Step) -> None:
    """Of rank 1 alone, in the second step."""
    if job.rank == 1 and job.steps == 2:
        next(step.model.parameters()).data.add_(1.0)


@pytest.mark.parametrize("between", [shrink, disturb_one])
def test_what_a_script_writes_stays_in_its_worker(
    monkeypatch: pytest.MonkeyPatch, between: Between
) -> None:
    train = training(between=between, clip_norm=0.01)
    shared = rehearsed(train, "ddp", 3)
    assert_same(shared, apart(monkeypatch, train, 3))
    kept = [0 if between is disturb_one and rank != 1 else 6 for rank in range(3)]
    assert [state for _, state in shared.results] == kept


@pytest.mark.parametrize("between", [None, shrink, disturb_one])
@pytest.mark.parametrize("strategy", ["ps", "ps(servers=2)", 'gossip(graph="ring")'])
def test_weights_of_servers_and_neighbours_are_read_where_they_are(
    monkeypatch: pytest.MonkeyPatch, strategy: str, between: Between | None
) -> None:
    train = training(between=between)
    shared = rehearsed(train, strategy, 4)
    assert_same(shared, apart(monkeypatch, train, 4, strategy))
    assert len(shared.link_bytes) > 0


def test_large_models_send_their_gradients_over_the_links() -> None:
    """Workers of one real host would read them in memory."""

    def train(job: Job) -> int:
        model = nn.Sequential(nn.Linear(DATA[0][0].numel(), 4), nn.Linear(4, SHARED_BYTES // 16))
        step = job.step(model, F.cross_entropy, optimizer=SGD)
        for batch in job.batches(DATA, batch_size=16, epochs=1):
            step(batch)
        assert type(step.flat) is FlatParams
        return step.flat.data.nbytes

    found = rehearsed(train, "ddp", 4)
    assert sum(found.link_bytes.values()) > 3 * 4 * found.results[0]
