"""ddp and zero: when the gradients of a bucket are summed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.group import Group
from shoal.replica.flat_params import FlatParams
from shoal.sync import Replica
from shoal.sync.ddp import DdpSync
from shoal.sync.optimizer_step import OptimizerStep
from shoal.sync.zero import ShardedUpdate, ZeroReduce, owned_params
from tests.conftest import World

SGD = partial(torch.optim.SGD, lr=0.1)


_LARGE = 1 << 18  # numbers: a bucket of its own


def ddp(flat: FlatParams, group: Group) -> DdpSync:
    return DdpSync(Replica(flat, OptimizerStep(flat.named, SGD), group), [slice(0, flat.size)])


def zero(flat: FlatParams, group: Group) -> ZeroReduce:
    replica = Replica(flat, OptimizerStep(owned_params(flat, group), SGD), group)
    return ZeroReduce(replica, 2, ShardedUpdate(replica), bucket_bytes=1 << 20)


@pytest.mark.parametrize(
    ("make", "takes_cores", "numbers", "sent_in_backward"),
    [
        *((make, False, 3, True) for make in (ddp, zero)),
        *((make, True, 3, False) for make in (ddp, zero)),
        (zero, True, _LARGE, True),  # two buckets wait
    ],
)
def test_a_call_that_would_take_a_core_from_backward_follows_it_while_there_is_room(
    world: World, make: Any, takes_cores: bool, numbers: int, sent_in_backward: bool
) -> None:
    def rank(group: Group) -> tuple[int, list[float]]:
        group.executor.takes_cores = takes_cores
        weights = [nn.Parameter(torch.zeros(numbers)) for _ in range(4)]
        flat = FlatParams([(f"weight{i}", weight) for i, weight in enumerate(weights)])
        sync = make(flat, group)
        sync.begin()
        flat.grads.arm(sync.reduce)
        loss = torch.stack([(i + 1) * weight.sum() for i, weight in enumerate(weights)]).sum()
        (loss * (group.rank + 1)).backward()
        sent = sync.traffic.total
        flat.grads.flush()
        sync.finish()
        return sent, [weight[0].item() for weight in weights]

    outcomes = world(2, rank)
    assert (sum(sent for sent, _ in outcomes) > 0) == sent_in_backward
    for _, updated in outcomes:
        assert updated == pytest.approx([-0.1 * (1 + 2) * (i + 1) for i in range(4)])
