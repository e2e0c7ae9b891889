"""Without training: the seconds and bytes of a rehearsal that trains, and nothing computed."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.rehearse.no_arithmetic import LARGE, NoArithmetic
from shoal.train.job import Job
from tests.rehearse.worlds import rehearsed

DATA = TensorDataset(torch.randn(64, 80), torch.randint(0, 10, (64,)))


def train(job: Job) -> float:
    model = nn.Sequential(nn.Linear(80, 160), nn.ReLU(), nn.Linear(160, 80), nn.Linear(80, 10))
    step = job.step(model, F.cross_entropy, optimizer=partial(torch.optim.AdamW, lr=0.1))
    for batch in job.batches(DATA, batch_size=32, epochs=2):
        job.log(loss=step(batch))
    return float(step.flat.data[: 80 * 160].abs().sum())


@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp", "zero(1)", "zero(3)", "ddp + tp(2)", "pp(2)", 'ddp(compress="int8")'),
        *("ps", "ps(quorum=0.75)", "ps(staleness=2)", 'ps(mode="async")', "ps(replicas=2)"),
        *(
            'gossip(graph="ring")',
            'gossip(mode="async")',
            "localsgd(every=2)",
            "hogwild(momentum=True)",
        ),
    ],
)
def test_seconds_and_bytes_are_those_of_training(strategy: str) -> None:
    workers = 2 if strategy == "pp(2)" else 4
    trained, not_trained = (
        rehearsed(train, strategy, workers, trains=trains) for trains in (True, False)
    )
    steps, same = (
        [np.diff(report["loss_s"]).tolist() for report in run.reports]
        for run in (trained, not_trained)
    )
    assert steps == [pytest.approx(one, abs=1.1e-6) for one in same]
    if "(2)" not in strategy:  # tp and pp compare themselves with the model before the first step
        assert trained.link_bytes == not_trained.link_bytes


def test_large_tensors_are_zeros_and_small_ones_are_real() -> None:
    side = int(LARGE**0.5)
    with NoArithmetic({}):
        large = torch.randn(side, side)
        product = large @ large + 1
        assert product.shape == (side, side) and not product.any()
        kept = product.add_(3.0)
        assert kept is product and not product.any()
        assert (large == product).all()  # what is no number is computed
        assert large[0, :5].add(2.0).tolist() == [2.0] * 5
        assert torch.ones(4).sum() == 4
        ids = torch.topk(torch.zeros(LARGE, 8), 2).indices
        assert len(ids.unique()) == 8  # tokens go to all experts
    assert torch.randn(side, side).any()


def test_gradients_have_their_shapes_and_need_no_arithmetic() -> None:
    with NoArithmetic({}):
        model = nn.Linear(80, 80)
        F.cross_entropy(model(torch.randn(64, 80)), torch.zeros(64, dtype=torch.long)).backward()
    assert model.weight.grad is not None and model.weight.grad.shape == (80, 80)
    assert not model.weight.any() and not model.weight.grad.any()
