"""Sums of sparse tensors: every rank gathers the entries of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.group import Group, Op


def add_sparse(group: Group, data: Tensor) -> None:
    """`data` becomes the sum; each rank sends as many entries as the fullest has."""
    entries = data.detach().coalesce().cpu()
    longest = torch.tensor([entries.values().shape[0]])
    group.all_reduce(longest, Op.MAX).wait()
    room = int(longest)
    indices = _gathered(group, entries.indices().t(), room)
    values = _gathered(group, entries.values(), room)
    total = torch.sparse_coo_tensor(
        indices.t(), values, entries.shape, dtype=entries.dtype, check_invariants=False
    )
    data.copy_(total.coalesce())


def _gathered(group: Group, rows: Tensor, room: int) -> Tensor:
    """The rows of all ranks, padded with zeros: an entry of value 0 at index 0 adds nothing."""
    padded = rows.new_zeros(room, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = padded.new_empty(group.size * room, *rows.shape[1:])
    group.all_gather(gathered, padded).wait()
    return gathered
