"""A guess of tp that fails before the first step is refused with a layer to keep whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.errors import BadInput
from tests.conftest import World
from tests.models import samples
from tests.splitting import job_of


class Normed(nn.Module):
    """Between its layers all features are needed, which their names and shapes do not tell."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.LSTM(6, 6, batch_first=True)
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) == 0:  # not traced
            return self.down(x)
        h = self.up(self.first(x[:, None])[0][:, 0])
        logits: Tensor = self.down(F.layer_norm(h, (16,)))
        return logits


def test_the_layer_whose_features_were_spread_is_named(world: World) -> None:
    def train(group: Group, strategy: str) -> None:
        with job_of(group, strategy, models[group.rank]) as (job, step):
            for batch in job.batches(samples(8, (6,)), 4):
                step(batch)

    models = [Normed(), Normed()]
    with pytest.raises(BadInput) as caught:
        world(2, lambda g: train(g, "tp(2)"))
    assert 'plan={"up": "whole"}' in str(caught.value)
    models = [Normed(), Normed()]
    world(2, lambda g: train(g, 'tp(2, plan={"up": "whole"})'))
