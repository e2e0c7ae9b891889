"""A model whose inputs are sequences, of which every rank of a cp group has some positions."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.pytree import Tree, map_tensors, tensors_of
from shoal.replica.context.sequence_shard import SequenceContext, SequenceShard
from shoal.replica.engine import Stage
from shoal.replica.microbatch_context import MicroBatch
from shoal.replica.split.sharded_tensor import full_tensors
from shoal.schedules.pipelines import Action


class ContextStage(Stage):
    """The only stage of a replica whose workers share sequences."""

    def __init__(self, model: nn.Module, device: torch.device, context: SequenceContext):
        super().__init__(model, device)
        self.context = context

    def compute(self, action: Action, micro: MicroBatch, inputs: Tree) -> Tree:
        return super().compute(action, micro, shard_inputs(inputs, self.context))

    def predict(self, inputs: Any) -> Any:
        return in_full(super().predict(shard_inputs(inputs, self.context)))


def shard_inputs(inputs: Tree, context: SequenceContext) -> Tree:
    """Tokens (batch, time) and features (batch, time, width) by their positions."""
    found: list[Tensor] = []

    def shard(tensor: Tensor) -> Tensor:
        is_sequence = tensor.dim() == (3 if tensor.is_floating_point() else 2)
        if not is_sequence or tensor.shape[1] < 2 * context.group.size:
            return tensor
        found.append(tensor)
        return context.shard(tensor, 1)

    sharded = map_tensors(shard, inputs)
    if not found:
        ranks = context.group.size
        raise BadInput(
            f"cp({ranks}) splits sequences, and the inputs have none of at least {2 * ranks} "
            "positions: tokens (batch, time), or features (batch, time, width)"
        )
    return sharded


def has_shards(tree: Tree) -> bool:
    """Whether a tree has been through `shard_inputs`."""
    return any(isinstance(tensor, SequenceShard) for tensor in tensors_of(tree))


def in_full(tree: Tree) -> Tree:
    """Outputs with all positions; those of Hugging Face keep their class."""
    if isinstance(tree, dict) and type(tree) is not dict:
        made = copy.copy(tree)
        for key, value in tree.items():
            made[key] = in_full(value)
        return made
    return full_tensors(tree, SequenceShard)
