"""Models of a loop of the user's own that no optimizer updates, such as target networks.

The script changes their weights itself, alike on every worker; a checkpoint keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.errors import CheckpointError
from shoal.train.checkpoint import Checkpoint
from shoal.train.named_tensors import copy_into, fit_model, model_tensors
from shoal.train.prepare_model import PreparedModel


def gather_untrained(models: Sequence[PreparedModel], saved: Checkpoint) -> None:
    """Add whole models to what is saved; all workers of the replica that saves call it."""
    ties = []
    for i, prepared in enumerate(models):
        tensors, tied = model_tensors(prepared.model)
        whole = prepared.shard.gather_full(tensors)
        saved.model |= {f"untrained{i}:{name}": tensor for name, tensor in whole.items()}
        ties.append(tied)
    saved.document["untrained"] = ties


def fit_untrained(
    models: Sequence[PreparedModel], saved: Checkpoint, where: Path
) -> list[dict[str, Tensor]]:
    """What a checkpoint has for each model; nothing where it was saved without them."""
    ties: Any = saved.document.get("untrained", [])
    if not isinstance(ties, list) or len(ties) not in (0, len(models)):
        raise CheckpointError(
            f"the checkpoint at {where} is of a script with other models without an optimizer"
        )
    found = []
    for i, (prepared, tied) in enumerate(zip(models, ties, strict=False)):
        prefix = f"untrained{i}:"
        tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in saved.model.items()
            if name.startswith(prefix)
        }
        whole = prepared.shard.take_shard(tensors)
        found.append(fit_model(prepared.model, whole, tied, where))
    return found


def load_untrained(models: Sequence[PreparedModel], tensors: Sequence[dict[str, Tensor]]) -> None:
    """Take what `fit_untrained` returned."""
    for prepared, of_model in zip(models, tensors, strict=False):
        copy_into(prepared.model, of_model)
