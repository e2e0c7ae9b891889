"""Stacked experts that take the tokens of every expert at once: (experts, tokens, width).

    source, 4 experts          owner of experts 2, 3
    x[0:2] stays, x[2:4]  ──▶  from rank 0: (2, tokens of rank 0, width)
                               from rank 1: (2, tokens of rank 1, width)     computed one by one

So are experts behind a one-hot dispatch with a capacity (GShard, Switch). A forward takes two
all-to-alls of `experts · tokens · width` numbers, a backward the same two in reverse.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shoal.errors import BadInput
from shoal.replica.expert.dispatch import ExpertPlacement, exchange
from shoal.replica.expert.mixtures import StackedMixture
from shoal.replica.expert.stacked import set_num_experts


class BatchedExperts:
    """Replaces the forward of the module: its own one computes what comes to this worker."""

    def __init__(self, mixture: StackedMixture, placement: ExpertPlacement):
        self._mixture = mixture
        self._placement = placement
        self._compute = mixture.module.forward
        set_num_experts(mixture, len(placement.local))
        mixture.module.forward = self.forward

    def forward(self, x: Any) -> Tensor:
        placement = self._placement
        experts = placement.num_experts
        if not isinstance(x, Tensor) or x.dim() < 3 or x.shape[0] != experts:
            given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise BadInput(
                f"{self._mixture.name} takes {given}: stacked experts that ep spreads take "
                f"(experts, tokens, width), or tokens, expert indices and weights"
            )
        shapes = self._shapes(x)
        counts = [len(r) for r in placement.ranges]
        local = len(placement.local)
        sent = [count * math.prod(x.shape[1:]) for count in counts]
        received = [local * math.prod(shape) for shape in shapes]
        arrived = exchange(x.reshape(-1), placement.group, sent, received)
        pieces = torch.split(arrived, received)
        results = [self._local(p.view(local, *s)) for p, s in zip(pieces, shapes, strict=True)]
        own = results[placement.group.rank].shape[1:]
        back = [count * math.prod(own) for count in counts]
        flat = torch.cat([result.reshape(-1) for result in results])
        out = exchange(flat, placement.group, [r.numel() for r in results], back)
        return out.view(experts, *own)

    def _local(self, x: Tensor) -> Tensor:
        out = self._compute(x)
        if not isinstance(out, Tensor) or out.shape[:2] != x.shape[:2]:
            raise BadInput(
                f"{self._mixture.name} does not return a row for each token of each expert, so ep "
                "cannot place its experts on other workers"
            )
        return out

    def _shapes(self, x: Tensor) -> list[list[int]]:
        """What each rank has for one expert."""
        group = self._placement.group
        own = torch.tensor(x.shape[1:], device=x.device)
        table = own.new_empty(group.size, len(own))
        group.all_gather(table, own).wait()
        found: list[list[int]] = table.tolist()
        return found
