"""What compression loses is kept, and sent later: the residual of a worker, in checkpoints too."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.replica.flat_params import FlatParams
from shoal.replica.split.shard import ReplicaShard

INDEX_BYTES = 8  # of a position in the buffer


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """A residual has at least 24 bits of precision, whatever the parameters have."""
    return torch.promote_types(dtype, torch.float32)


def new_residual(flat: FlatParams, numel: int) -> Tensor:
    return torch.zeros(numel, dtype=residual_dtype(flat.dtype), device=flat.device)


def take_residual(tensors: dict[str, Tensor], residual: Tensor, rank: int, size: int) -> None:
    """Load the saved residual of one of `size` workers.

    If another number of workers has saved, each takes an equal fraction of the sum.
    """
    saved = _residuals(tensors)
    of_rank = tensors.get(f"worker/{rank}/residual")
    if of_rank is not None and len(saved) == size:
        residual.copy_(of_rank)
    else:
        total = torch.stack(saved).sum(0) if saved else torch.zeros(())
        residual.copy_(total / size)


def check_residuals(tensors: dict[str, Tensor], residual: Tensor) -> None:
    """Refuse what `take_residual` could not load."""
    for tensor in _residuals(tensors):
        check_size(tensor, residual)


def _residuals(tensors: dict[str, Tensor]) -> list[Tensor]:
    return [t for name, t in tensors.items() if name.endswith("/residual")]


def check_size(saved: Tensor, expected: Tensor) -> None:
    if not saved.is_floating_point():
        raise CheckpointError(
            f"the checkpoint's state of the strategy is damaged: it has {saved.dtype} where "
            f"{expected.dtype} belongs"
        )
    if saved.shape != (expected.numel(),):
        raise CheckpointError(
            "the checkpoint's state of the strategy is of another model: it has "
            f"{saved.numel()} elements, and this one needs {expected.numel()}"
        )


def check_number(saved: Tensor) -> None:
    """Refuse what is not one count."""
    if saved.numel() != 1 or saved.dtype != torch.int64 or int(saved) < 0:
        raise CheckpointError(
            "the checkpoint's state of the strategy is damaged: a count is "
            f"{tuple(saved.shape)} of {saved.dtype}"
        )


def is_alike(saved: Tensor, expected: Tensor) -> bool:
    return saved.shape == expected.shape and saved.dtype == expected.dtype


def synchronize_copies(flat: FlatParams, buffer: Tensor, copies: ReplicaShard | None) -> None:
    """Make equal what several workers of a replica have of the same parameters in `buffer`."""
    if copies is not None:
        copies.synchronize_copies({p: flat.view(i, buffer, 0) for i, p in enumerate(flat.params)})


def unused_positions(flat: FlatParams, copies: ReplicaShard | None) -> Tensor:
    """Positions of the buffer between parameters, and of copies that another worker decides."""
    positions = [flat.gaps()]
    for param, p in zip(flat.ranges, flat.params, strict=True):
        if copies is not None and copies.is_duplicate(p):
            positions.append(torch.arange(param.start, param.stop, device=flat.device))
    return torch.cat(positions)
