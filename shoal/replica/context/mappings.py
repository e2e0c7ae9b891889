"""Autograd mappings between activations of which ranks have positions and full ones.

             forward        backward
    gather   all-gather     reduce-scatter     an operation needs all positions
    reduce   all-reduce     all-reduce         a sum over positions

A full activation is the same on all ranks, and its gradient is the sum of what the ranks have of
it, as that of a parameter is.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from shoal.comm.group import Group
from shoal.replica.context.spec import SequenceSpec
from shoal.replica.mapping import mapped, sum_over_ranks


def gather(local: Tensor, spec: SequenceSpec, group: Group) -> Tensor:
    forward = partial(spec.all_gather, group=group)
    return mapped(local, forward, partial(spec.sum_to_local, group=group))


def reduce(x: Tensor, group: Group) -> Tensor:
    return sum_over_ranks(x, group)
