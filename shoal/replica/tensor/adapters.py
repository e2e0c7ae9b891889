"""Layers of other libraries that tp knows: nn.Transformer, and GPT-2 of transformers.

A new adapter is a case in `known_pairs`, and one in `adapt` if the module around the split layers
keeps a number of its own, or reaches around its children.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.replica.tensor.layers.linear import ColumnLinear
from shoal.replica.tensor.layers.linear_like import is_transformers

ELEMENTWISE = (
    nn.ReLU,
    nn.ReLU6,
    nn.GELU,
    nn.Tanh,
    nn.Sigmoid,
    nn.SiLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.LeakyReLU,
    nn.Mish,
    nn.Softplus,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Dropout,
    nn.Identity,
)


class LayerPair(NamedTuple):
    """A column and a row layer with elementwise operations, or heads, between them.

    Names are those of children. The units are runs of features that stay on one rank.
    """

    column: str
    row: str
    column_unit: int = 1
    row_unit: int = 1
    blocks: int = 1  # of the column layer: queries, keys and values stand one after the other


def known_pairs(module: nn.Module) -> Iterator[LayerPair]:
    """The pairs among the children of a module of another library."""
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        if module.activation in (F.relu, F.gelu) or isinstance(module.activation, ELEMENTWISE):
            yield LayerPair("linear1", "linear2")
    elif is_transformers(module, "GPT2MLP"):
        yield LayerPair("c_fc", "c_proj")
    elif is_transformers(module, "GPT2Attention") and not _is_cross_attention(module):
        unit = int(module.head_dim)  # type: ignore[arg-type]
        yield LayerPair("c_attn", "c_proj", unit, unit, blocks=3)


def _is_cross_attention(module: nn.Module) -> bool:
    return bool(getattr(module, "is_cross_attention", True))


def adapt(model: nn.Module, group: Group) -> None:
    """Change what modules around split layers would get wrong."""
    for module in model.modules():
        if is_transformers(module, "GPT2Attention"):
            _set_split_size(module, group)
        elif isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # no fast path in evaluation
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
            module.enable_nested_tensor = False


def _set_split_size(module: nn.Module, group: Group) -> None:
    """GPT-2's attention splits its queries, keys and values by a number that it keeps."""
    layer = getattr(module, "c_attn", None)
    if isinstance(layer, ColumnLinear):
        width = layer.spec.length(group.rank) // 3
        module.split_size = width  # type: ignore[assignment]
