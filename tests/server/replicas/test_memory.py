"""Pushes that the head of a chain reads from the memory of their worker."""

from __future__ import annotations

import pytest
import torch

from shoal.server.client import Client
from shoal.server.consistency import Rule
from shoal.server.model.named_optimizer import step_without_hooks
from tests.server.replicas.world import World, pulled, push_one_hot, world

ASYNC = Rule(1, asynchronous=True)


def test_a_push_is_overwritten_only_when_all_have_it() -> None:
    """`push_one_hot` overwrites the memory at once: each copy would differ."""
    with world() as made:
        client = made.client(0, ASYNC)
        for step in range(30):
            push_one_hot(client, step % 5, step)
        copies = [made.weights_of(0, replica) for replica in range(3)]
        assert pulled(client)[:5] == [-6.0] * 5
        assert all(torch.equal(copies[0], copy) for copy in copies)
        client.close()


@pytest.mark.parametrize("rule", [Rule(2), Rule(2, quorum=2)], ids=["synchronous", "quorum"])
def test_a_push_that_waits_for_others_is_kept(rule: Rule) -> None:
    """Worker 0 overwrites its memory while its push waits for that of worker 1."""
    with world() as made:
        first, second = joined(made, rule)
        push_one_hot(first, 0, 0)
        first.out.fill_(7.0)
        push_one_hot(second, 1, 0)
        moved = -1.0 if rule.quorum is None else -0.5  # of the fraction that was pushed
        assert pulled(first, version=1)[:3] == [moved, moved, 0.0]
        first.close()
        second.close()


def joined(made: World, rule: Rule) -> tuple[Client, Client]:
    return made.client(0, rule), made.client(1, rule)


def test_the_step_without_hooks_is_the_same_step() -> None:
    results = []
    for is_plain in (False, True):
        p = torch.nn.Parameter(torch.ones(6))
        optimizer = torch.optim.AdamW([p], lr=0.1)
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        step = step_without_hooks(optimizer) if is_plain else optimizer.step
        p.grad = torch.arange(6.0)
        step()
        assert len(calls) == (0 if is_plain else 1)
        results.append(p.detach())
    assert torch.equal(*results)
