"""Tensor parallelism: a model's layers, each over the ranks of a tp group.

All ranks have the same batch. A split layer starts from what all of them have, and what it ends
with all of them have again, bit for bit; so layers that are not split compute the same on every
rank, and their gradients and weights stay the same without any exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.pytree import Tree
from shoal.replica.deferred_init import TensorSlot, full_name
from shoal.replica.tensor.attention import SplitAttention
from shoal.replica.tensor.layers import (
    ColumnLinear,
    RowLinear,
    SplitLayer,
    VocabularyEmbedding,
)
from shoal.replica.tensor.linear_like import is_transformers
from shoal.replica.tensor.plan import Role, Roles
from shoal.replica.tensor.rng import Streams
from shoal.replica.tensor.sequence_parallel import pack, unpack
from shoal.replica.tensor.shard_spec import Share


class TensorSplit:
    """A model whose layers were replaced; `shares` tells which parameters are slices, by name."""

    def __init__(
        self,
        model: nn.Module,
        roles: Roles,
        group: Group,
        device: torch.device,
        filled: Iterable[list[TensorSlot]],
        sequence: bool = False,
    ):
        """`filled` hands over one whole tensor after the other, by its places. With `sequence`,
        between split layers every rank has some positions."""
        self.model = model
        self.group = group
        self.device = device
        self.streams = Streams(group.rank, is_random(model))
        modules = dict(model.named_modules())
        layers = {modules[name]: self._layer(modules[name], role) for name, role in roles.items()}
        self._slices: set[nn.Parameter] = set()
        self._slice(layers.values(), filled)
        self._replace(layers)
        self._tell_parents()
        for module in model.modules():
            if isinstance(module, SplitLayer):
                module.in_rows = sequence
        _take_slow_paths(model)
        self.shares = {
            full_name(prefix, own): share
            for prefix, module in model.named_modules(remove_duplicate=False)
            for own, share in (module.shares.items() if isinstance(module, SplitLayer) else ())
        }

    def is_slice(self, parameter: nn.Parameter) -> bool:
        return parameter in self._slices

    def is_duplicate(self, parameter: nn.Parameter) -> bool:
        """Whether the first rank holds it, too."""
        return self.group.rank > 0 and not self.is_slice(parameter)

    def gather_full(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors from slices; all ranks call it. Keys are a parameter's name, or that and
        "/" and what an optimizer keeps of it."""
        return {name: self._joined(name, tensor) for name, tensor in tensors.items()}

    def take_shard(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's slices of whole tensors; what has another shape is left as it is."""
        return {name: self._taken(name, tensor) for name, tensor in tensors.items()}

    def pack(self, tree: Tree) -> Tree:
        """What goes from this rank of a stage to the same one of another: plain tensors."""
        return pack(tree)

    def unpack(self, tree: Tree) -> Tree:
        return unpack(tree, self.group, self.streams)

    def synchronize_copies(self, tensors: Mapping[nn.Parameter, Tensor]) -> None:
        """Replace what belongs to a parameter that every rank holds by what the first one has."""
        copies = [tensor for p, tensor in tensors.items() if not self.is_slice(p)]
        if not copies:
            return
        together = torch.cat([tensor.reshape(-1) for tensor in copies])
        self.group.broadcast(together).wait()
        parts = torch.split(together, [tensor.numel() for tensor in copies])
        for tensor, part in zip(copies, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    def _joined(self, name: str, tensor: Tensor) -> Tensor:
        share = self._share(name)
        if share is None or share.dim >= tensor.dim():
            return tensor
        return share.gather(tensor.to(self.device), self.group).to(tensor.device)

    def _taken(self, name: str, tensor: Tensor) -> Tensor:
        share = self._share(name)
        if share is None or share.dim >= tensor.dim() or tensor.shape[share.dim] != share.size:
            return tensor
        return share.take(tensor, self.group.rank)

    def _share(self, name: str) -> Share | None:
        return self.shares.get(name) or self.shares.get(name.rpartition("/")[0])

    def _replace(self, new: dict[nn.Module, SplitLayer]) -> None:
        if self.model in new:
            raise BadInput(
                f"tp cannot split a model that is one {type(self.model).__name__}: put it into an "
                "nn.Sequential"
            )
        for module in list(self.model.modules()):
            for name, child in module._modules.items():
                if child is not None and child in new:
                    module._modules[name] = new[child]

    def _layer(self, whole: nn.Module, role: Role) -> SplitLayer:
        streams = self.streams
        if isinstance(whole, nn.Embedding):
            return VocabularyEmbedding(whole, self.group, streams)
        if isinstance(whole, nn.MultiheadAttention):
            return SplitAttention(whole, self.group, streams)
        if role.kind == "column":
            return ColumnLinear(whole, self.group, streams, role.unit, role.output, role.blocks)
        return RowLinear(whole, self.group, streams, role.unit, role.input_is_split)

    def _tell_parents(self) -> None:
        """GPT-2's attention cuts its queries, keys and values apart by a number that it keeps."""
        for module in self.model.modules():
            layer = getattr(module, "c_attn", None)
            if isinstance(layer, ColumnLinear) and is_transformers(module, "GPT2Attention"):
                width = layer.share.length(self.group.rank) // 3
                module.split_size = width  # type: ignore[assignment]

    def _slice(self, layers: Iterable[SplitLayer], filled: Iterable[list[TensorSlot]]) -> None:
        """Let every parameter that is split hold this rank's slice."""
        shares: dict[Tensor, Share] = {}
        for module in [inner for layer in layers for inner in layer.modules()]:
            for own, share in module.shares.items() if isinstance(module, SplitLayer) else ():
                shares[getattr(module, own)] = share
        for found in filled:
            parameter = found[0].tensor
            if parameter in shares and isinstance(parameter, nn.Parameter):
                parameter.data = shares[parameter].take(parameter.detach(), self.group.rank)
                self._slices.add(parameter)


def is_random(model: nn.Module) -> bool:
    """Whether anything in a model drops."""
    return any(
        float(value) > 0
        for module in model.modules()
        for value in (getattr(module, "p", 0.0), getattr(module, "dropout", 0.0))
        if isinstance(value, float)
    )


def _take_slow_paths(model: nn.Module) -> None:
    """torch's layers have paths for evaluation that reach around their children."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = module.enable_nested_tensor = False
