"""ddp: when the gradients of a bucket are summed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from shoal.comm.group import Group
from shoal.replica.flat.params import FlatParams
from shoal.sync.base import Replica
from shoal.sync.ddp import DdpSync
from shoal.sync.optimizer_step import OptimizerStep
from tests.conftest import World

SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("takes_cores", [False, True])
def test_a_call_that_would_take_a_core_from_backward_follows_it(
    world: World, takes_cores: bool
) -> None:
    def rank(group: Group) -> tuple[int, float]:
        group.executor.takes_cores = takes_cores
        weight = nn.Parameter(torch.zeros(3))
        flat = FlatParams([("weight", weight)])
        sync = DdpSync(Replica(flat, OptimizerStep(flat.named, SGD), group), [slice(0, flat.size)])
        sync.begin()
        flat.grads.arm(sync.reduce)
        (weight * (group.rank + 1)).sum().backward()  # type: ignore[no-untyped-call]
        flat.grads.flush()
        sent_in_backward = sync.traffic.total
        sync.finish()
        return sent_in_backward, weight[0].item()

    for sent_in_backward, updated in world(2, rank):
        assert (sent_in_backward == 0) == takes_cores
        assert updated == pytest.approx(-0.1 * (1 + 2))
