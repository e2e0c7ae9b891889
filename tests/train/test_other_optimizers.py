from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World


class Wrapper(torch.optim.Optimizer):
    """Has another optimizer of the same parameters, as SAM does."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)

    def step(self, closure: Any = None) -> None:
        self.base.step()


@pytest.mark.parametrize("strategy", ["ddp", "zero(2)"])
def test_an_optimizer_that_the_job_does_not_know_is_refused(world: World, strategy: str) -> None:
    def body(group: Group) -> str:
        job = Job(parse(strategy), group, device=torch.device("cpu"))
        model = nn.Linear(4, 1)
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = job.setup(model, Wrapper(model.parameters()))
        try:
            job.backward(model(torch.ones(2, 4)).mean())
            optimizer.step()
            with pytest.raises(BadInput) as caught:
                other.step()
        finally:
            job.close()
        other.step()  # the job is over
        return str(caught.value)

    for sentence in world(2, body):
        assert "SGD" in sentence and "weight" in sentence and "job.setup" in sentence
