"""Layers that multiply with one matrix: nn.Linear, and Conv1D of Hugging Face's transformers.

Conv1D keeps its weight transposed, (inputs, outputs).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class LinearLike:
    """How the weight of such a layer lies."""

    inputs: int
    outputs: int
    is_transposed: bool = False

    @property
    def output_dim(self) -> int:
        return 1 if self.is_transposed else 0

    @property
    def input_dim(self) -> int:
        return 1 - self.output_dim

    def for_linear(self, weight: Tensor) -> Tensor:
        """The weight as F.linear takes it."""
        return weight.t() if self.is_transposed else weight


def linear_like(module: nn.Module | None) -> LinearLike | None:
    """None for a layer of another kind, or one whose weight is computed from others."""
    if module is None or set(module._parameters) != {"weight", "bias"}:
        return None
    is_plain = type(module).forward is nn.Linear.forward or is_transformers(module, "FalconLinear")
    if isinstance(module, nn.Linear) and is_plain:
        return LinearLike(module.in_features, module.out_features)
    if is_transformers(module, "Conv1D"):
        weight = module._parameters["weight"]
        assert weight is not None
        return LinearLike(weight.shape[0], weight.shape[1], is_transposed=True)
    return None


def is_transformers(module: nn.Module, name: str) -> bool:
    """Whether it is of that class of transformers, which need not be installed."""
    kind = type(module)
    return kind.__name__ == name and kind.__module__.startswith("transformers.")
