"""The order of additions is a tree over the index of the micro-batch, wherever it is computed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.replica.flat_params import FlatParams
from shoal.replica.ordered_sum import tree_sum
from shoal.schedules.addition_tree import full_subtrees, runs_of
from shoal.strategy.sync_terms import Ddp
from shoal.sync import Replica, plan_for
from shoal.sync.ddp import ExactReduce
from shoal.sync.optimizer_step import OptimizerStep
from tests.conftest import World
from tests.jobs import after_training

pairs = [(m, r) for m in range(1, 33) for r in range(1, m + 1) if m % r == 0]


def leaves_of(m: int, seed: int) -> list[Tensor]:
    """Numbers of very different sizes, so that another order gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(-12, 12, (m, 3), generator=generator)
    return list(torch.randn(m, 3, generator=generator) * 2.0**size)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(pairs), st.integers(0, 1 << 30))
def test_the_sum_has_the_same_bits_at_any_number_of_replicas(
    pair: tuple[int, int], seed: int
) -> None:
    """Each sends at most twice the depth of the tree."""
    m, r = pair
    leaves = {(i, i + 1): leaf for i, leaf in enumerate(leaves_of(m, seed))}
    alone = tree_sum((0, m), leaves)
    subtrees = [full_subtrees((0, m), run) for run in runs_of(m, r)]
    assert max(map(len, subtrees)) <= 2 * max(1, (m - 1).bit_length())
    gathered = {node: tree_sum(node, leaves) for nodes in subtrees for node in nodes}
    assert torch.equal(tree_sum((0, m), gathered), alone)


def reduce_by_hand(
    group: Group, m: int, bucket_bytes: int, dtype: torch.dtype
) -> tuple[Tensor, list[float]]:
    """Every micro-batch puts its own numbers into the buffer; the agreed gradient and head."""
    sizes = {"a": 5, "b": 40}
    flat = FlatParams((n, nn.Parameter(torch.zeros(s, dtype=dtype))) for n, s in sizes.items())
    update = OptimizerStep(flat.named, partial(torch.optim.SGD, lr=1.0))
    sync = ExactReduce(Replica(flat, update, group), m, bucket_bytes)
    each = m // group.size
    sync.begin()
    for place in range(group.rank * each, (group.rank + 1) * each):
        flat.grads.arm(sync.reduce)
        generator = torch.Generator().manual_seed(place)
        flat.grads.header[0] = float(place)
        for p in flat.params:
            p.grad = (torch.randn(p.shape, generator=generator) * 10**place).to(dtype)
        flat.grads.flush()
    sync.finish()
    return flat.data.clone(), flat.grads.header.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
@pytest.mark.parametrize("m", [4, 6])
def test_the_update_has_the_same_bits_at_any_number_of_replicas(
    world: World, m: int, bucket_bytes: int, dtype: torch.dtype
) -> None:
    alone, head = reduce_by_hand(solo_group(), m, bucket_bytes, dtype)
    assert head == [sum(range(m)), m, m], "the sum of losses, and a flag from every micro-batch"
    for size in (r for r in range(2, m + 1) if m % r == 0):
        for data, got_head in world(size, lambda g: reduce_by_hand(g, m, bucket_bytes, dtype)):
            assert torch.equal(data, alone)
            assert got_head == head


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        *(
            (strategy, {}, "exact=True .*take ddp")
            for strategy in (
                *('ddp(compress="int8")', 'ps(placement="rank0", compress="int8")'),
                'ps(placement="rank0", mode="async")',
                *("hogwild", "gossip", "localsgd", "mapreduce"),
            )
        ),
        ("ddp", {"microbatches": 1}, "2 replicas are more than microbatches=1"),
        ("ddp", {"accumulate": 2}, "set microbatches, not accumulate"),
    ],
)
def test_what_does_not_add_up_in_full_is_refused(
    world: World, strategy: str, options: Any, words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        after_training(world, 2, strategy, exact=True, **options)


def test_scaled_gradients_are_not_compressed() -> None:
    with pytest.raises(BadInput, match='precision="fp16" exclude each other'):
        plan_for(Ddp(compress="int8"), 1).check(False, "fp16", 1)
