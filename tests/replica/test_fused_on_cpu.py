"""One kernel updates all parameters on a CPU; what a script has set stays as it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shoal.replica.optimizers import fused_on_cpu

KINDS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, maximize=True),
    "chosen": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "other": partial(torch.optim.RMSprop, lr=0.01),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("late", [False, True], ids=["all have gradients", "one has none at first"])
def test_updates_are_those_of_the_plain_step(kind: str, late: bool) -> None:
    """An expert that gets no token in the first step has no gradient then, and no momentum yet."""
    torch.manual_seed(0)
    pairs = [(p, nn.Parameter(p.detach().clone())) for p in nn.Linear(5, 3).parameters()]
    plain, fused = (KINDS[kind]([pair[i] for pair in pairs]) for i in range(2))
    settings: Any = [dict(group, params=None) for group in fused.param_groups]
    for step in range(4):
        for p, copy in pairs[int(late and step == 0) :]:
            p.grad = torch.randn_like(p)
            copy.grad = p.grad.clone()
        plain.step()
        with fused_on_cpu(fused):
            fused.step()
    for p, copy in pairs:
        torch.testing.assert_close(copy, p)
        assert fused.state[copy].keys() == plain.state[p].keys()
    assert [dict(group, params=None) for group in fused.param_groups] == settings


def test_sparse_gradients_are_updated_row_by_row() -> None:
    rows = nn.Embedding(4, 2, sparse=True)
    before = rows.weight.detach().clone()
    rows(torch.tensor([1])).sum().backward()
    optimizer = torch.optim.SGD(rows.parameters(), lr=1.0)
    with fused_on_cpu(optimizer):
        optimizer.step()
    assert torch.equal(rows.weight.detach(), before - torch.tensor([[0.0], [1], [0], [0]]))
