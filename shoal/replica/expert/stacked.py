"""A module with the stacked parameters of all experts, of which this worker has a slice."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.pytree import map_tensors
from shoal.replica.context.sequence_shard import SequenceShard
from shoal.replica.expert.dispatch import Dispatch, ExpertPlacement, exchange
from shoal.replica.expert.mixtures import StackedMixture, mixtures_of


class StackedExperts:
    """Replaces the forward of the module: its own one computes what comes to this worker.

    A token travels once for each expert that it is routed to, with its router weight.
    """

    def __init__(self, mixture: StackedMixture, placement: ExpertPlacement):
        assert mixture.routed is not None
        self._names = mixture.routed
        self._placement = placement
        self._compute = _module_call(mixture.module)
        _set_num_experts(mixture, len(placement.local))
        _replace_forward(mixture, self._forward)

    def _forward(self, arguments: dict[str, Any]) -> Tensor:
        hidden: Tensor = arguments.pop(self._names.tokens)
        indices: Tensor = arguments.pop(self._names.indices)
        weights: Tensor = arguments.pop(self._names.weights)
        tokens = hidden.reshape(-1, hidden.shape[-1])
        indices = indices.reshape(len(tokens), -1)
        weights = weights.reshape(len(tokens), -1)
        is_dense = weights.shape != indices.shape  # a weight for every expert
        weights = weights.gather(1, indices) if is_dense else weights
        dispatch = Dispatch(self._placement, indices.flatten())
        choices = indices.shape[1]
        x = dispatch.to_experts(tokens.index_select(0, dispatch.order // choices))
        w = dispatch.to_experts(weights.reshape(-1, 1).index_select(0, dispatch.order))
        local = dispatch.local_experts[:, None]
        out = dispatch.to_sources(self._local(x, local, w, is_dense, arguments))
        return out.view(len(tokens), choices, -1).sum(1).view(*hidden.shape[:-1], -1)

    def _local(
        self, x: Tensor, experts: Tensor, weights: Tensor, is_dense: bool, others: dict[str, Any]
    ) -> Tensor:
        """What the experts of this worker make of the rows that have come."""
        if len(x) == 0:  # a row of zeros gives the parameters a gradient of 0, as on one device
            row = x.new_zeros(1, x.shape[1]) + x.sum() * 0
            first = experts.new_zeros(1, 1)
            weight = weights.new_zeros(1, 1) + weights.sum() * 0
            return self._local(row, first, weight, is_dense, others)[:0]
        if is_dense:
            table = weights.new_zeros(len(x), len(self._placement.local))
            weights = table.scatter(1, experts, weights)
        names = self._names
        given = {names.tokens: x, names.indices: experts, names.weights: weights, **others}
        return torch.reshape(self._compute(given), (len(x), -1))


def compute_positions_here(model: nn.Module) -> None:
    """Let stacked experts that are complete compute the tokens of the positions that are here."""
    for mixture in mixtures_of(model):
        if isinstance(mixture, StackedMixture) and mixture.routed is not None:
            _replace_forward(mixture, _module_call(mixture.module))


ByName = Callable[[dict[str, Any]], Tensor]  # of the arguments of a forward


def _module_call(module: nn.Module) -> ByName:
    """The present forward of a module."""
    forward = module.forward
    signature = inspect.signature(forward)

    def compute(arguments: dict[str, Any]) -> Tensor:
        call = inspect.BoundArguments(signature, OrderedDict(arguments))
        out: Tensor = forward(*call.args, **call.kwargs)
        return out

    return compute


def _replace_forward(mixture: StackedMixture, compute: ByName) -> None:
    """Where tokens are those of some positions, what comes with them is of the same ones."""
    signature = inspect.signature(mixture.module.forward)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        assert mixture.routed is not None
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        tokens = arguments[mixture.routed.tokens]
        if not isinstance(tokens, SequenceShard):
            return compute(arguments)
        local = map_tensors(partial(_at_positions_of, tokens), arguments)
        return tokens.context.wrap(compute(local), tokens.spec)

    mixture.module.forward = forward


def _at_positions_of(tokens: SequenceShard, tensor: Tensor) -> Tensor:
    """The rows of a tensor that belong to the same positions as `tokens`."""
    spec = tokens.spec
    if isinstance(tensor, SequenceShard):
        return tensor.local if tensor.spec == spec else _at_positions_of(tokens, tensor.full())
    is_by_token = tensor.dim() > spec.dim and tensor.shape[spec.dim] == spec.size
    return spec.take_local(tensor, tokens.context.rank) if is_by_token else tensor


def _set_num_experts(mixture: StackedMixture, local: int) -> None:
    """Let the module know how many experts are here."""
    for key, value in list(vars(mixture.module).items()):
        if "expert" in key and type(value) is int and value == mixture.num_experts:
            setattr(mixture.module, key, local)


class BatchedExperts:
    """Replaces the forward of the module: its own one computes what comes to this worker."""

    def __init__(self, mixture: StackedMixture, placement: ExpertPlacement):
        self._name = mixture.name
        self._placement = placement
        self._compute = mixture.module.forward
        _set_num_experts(mixture, len(placement.local))
        mixture.module.forward = self.forward

    def forward(self, x: Tensor) -> Tensor:
        placement = self._placement
        experts = placement.num_experts
        if x.dim() < 3 or x.shape[0] != experts:
            raise BadInput(
                f"{self._name} takes {tuple(x.shape)}: stacked experts that ep spreads take "
                f"(experts, tokens, width), or tokens, expert indices and weights"
            )
        shapes = self._shapes(x)
        counts = [len(r) for r in placement.ranges]
        local = len(placement.local)
        sent = [count * math.prod(x.shape[1:]) for count in counts]
        received = [local * math.prod(shape) for shape in shapes]
        arrived = exchange(x.reshape(-1), placement.group, sent, received)
        pieces = torch.split(arrived, received)
        results = [self._compute(p.view(local, *s)) for p, s in zip(pieces, shapes, strict=True)]
        own = results[placement.group.rank].shape[1:]
        back = [count * math.prod(own) for count in counts]
        flat = torch.cat([result.reshape(-1) for result in results])
        out = exchange(flat, placement.group, [r.numel() for r in results], back)
        return out.view(experts, *own)

    def _shapes(self, x: Tensor) -> list[list[int]]:
        """What each rank has for one expert."""
        group = self._placement.group
        own = torch.tensor(x.shape[1:], device=x.device)
        table = own.new_empty(group.size, len(own))
        group.all_gather(table, own).wait()
        found: list[list[int]] = table.tolist()
        return found
