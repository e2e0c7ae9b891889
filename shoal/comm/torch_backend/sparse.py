"""Sums of sparse tensors: everybody gathers everybody's entries."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.group import Group, Op


def add_sparse(group: Group, data: Tensor) -> None:
    """`data` becomes the sum; each rank sends as many entries as the fullest has."""
    own = data.detach().coalesce().cpu()
    longest = torch.tensor([own.values().shape[0]])
    group.all_reduce(longest, Op.MAX).wait()
    room = int(longest)
    indices = _gathered(group, own.indices().t(), room)
    values = _gathered(group, own.values(), room)
    whole = torch.sparse_coo_tensor(
        indices.t(), values, own.shape, dtype=own.dtype, check_invariants=False
    )
    data.copy_(whole.coalesce())


def _gathered(group: Group, rows: Tensor, room: int) -> Tensor:
    """Everybody's rows, filled up with zeros: an entry of value 0 at index 0 adds nothing."""
    own = rows.new_zeros(room, *rows.shape[1:])
    own[: rows.shape[0]] = rows
    everything = own.new_empty(group.size * room, *rows.shape[1:])
    group.all_gather(everything, own).wait()
    return everything
