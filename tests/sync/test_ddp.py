"""ddp and zero: when the gradients of a bucket are summed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from shoal.comm.group import Group
from shoal.replica.flat_params import FlatParams
from shoal.sync import Replica
from shoal.sync.ddp import DdpSync
from shoal.sync.optimizer_step import OptimizerStep
from shoal.sync.zero import owned_params
from shoal.sync.zero_reduce import ZeroReduce
from shoal.sync.zero_update import ShardedUpdate
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


_LARGE = 1 << 18  # numbers: a bucket of its own


@pytest.mark.parametrize(
    ("takes_cores", "numbers", "sent_in_backward"),
    [(False, 3, True), (True, 3, False), (True, _LARGE, True)],
    ids=["beside backward", "after it", "where two buckets wait"],
)
def test_a_call_that_would_take_a_core_waits_while_there_is_room(
    world: World, takes_cores: bool, numbers: int, sent_in_backward: bool
) -> None:
    def rank(group: Group) -> tuple[int, list[float]]:
        group.executor.takes_cores = takes_cores
        weights = [nn.Parameter(torch.zeros(numbers)) for _ in range(4)]
        flat = FlatParams([(f"weight{i}", weight) for i, weight in enumerate(weights)])
        update = OptimizerStep(owned_params(flat, group), SGD)
        replica = Replica(flat, update, group)
        sync = ZeroReduce(replica, 2, ShardedUpdate(replica), bucket_bytes=1 << 20)
        sync.begin()
        flat.grads.arm(sync.reduce)
        loss = torch.stack([(i + 1) * weight.sum() for i, weight in enumerate(weights)]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        sent = sync.traffic.total
        flat.grads.flush()
        sync.finish()
        return sent, [weight[0].item() for weight in weights]

    outcomes = world(2, rank)
    assert (sum(sent for sent, _ in outcomes) > 0) == sent_in_backward
    for _, updated in outcomes:
        assert updated == pytest.approx([-0.1 * 2 * (i + 1) for i in range(4)])
