"""Whether two computations agree but for rounding: outputs, and gradients by parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# as a part of the largest number
_TOLERANCES = {torch.float64: 1e-6, torch.bfloat16: 5e-2, torch.float16: 2e-2}
_NOISE = 1e-5  # of the largest gradient: what rounding leaves where the gradient is 0


class Computed(NamedTuple):
    """What a model made of a batch; gradients are those of `score_of` its outputs."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]

    def has_outputs(self, others: list[Tensor], first: bool = False) -> bool:
        """Whether `others` are equal but for rounding; with `first`, that one alone."""
        if first:
            return all(is_close(a, b) for a, b in zip(self.outputs[:1], others[:1], strict=False))
        if [t.shape for t in others] != [t.shape for t in self.outputs]:
            return False
        return all(is_close(a, b) for a, b in zip(self.outputs, others, strict=True))


def largest_of(values: Tensor) -> float:
    """Of the finite ones: a model may compute NaN for padding that nothing depends on."""
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def is_close(expected: Tensor, actual: Tensor, noise: float = 0.0, share: float = 1.0) -> bool:
    """Whether at least `share` of the numbers are equal but for rounding and `noise`."""
    if expected.shape != actual.shape:
        return bool(not expected.any() and not actual.any())
    if not expected.numel():
        return True
    a = expected.double()
    atol = _TOLERANCES.get(expected.dtype, 1e-3) * largest_of(a) + noise
    close = torch.isclose(a, actual.double(), rtol=0.0, atol=atol, equal_nan=True)
    return bool(close.all()) if share == 1.0 else float(close.double().mean()) >= share


def noise_of(gradients: Mapping[str, Tensor | None]) -> float:
    return _NOISE * max((largest_of(g) for g in gradients.values() if g is not None), default=0.0)


def is_same(wanted: Tensor | None, found: Tensor | None, noise: float) -> bool:
    """Of gradients, of which one that is missing is 0."""
    if wanted is None or found is None:
        present = found if wanted is None else wanted
        return present is None or largest_of(present) <= noise
    return is_close(wanted, found, noise)


def gradients_of(outputs: list[Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """The gradients of a fixed combination of all outputs by the leaves that need one.

    The leaves are no one else's. Where blocks of the model are checkpointed, this calls them again.
    """
    trained = {name: p for name, p in leaves.items() if p.requires_grad}
    scored = [t for t in outputs if t.requires_grad]
    if not trained or not scored:
        return {}
    with torch.enable_grad():  # the script may call the model without
        total = score_of(scored)
    total.backward()  # type: ignore[no-untyped-call]  # reentrant checkpoints take nothing else
    return {name: leaf.grad for name, leaf in trained.items()}


def score_of(outputs: list[Tensor]) -> Tensor:
    """A fixed combination of all of their numbers."""
    scores = []
    for output in outputs:
        weights = torch.arange(output.numel(), device=output.device, dtype=torch.float32).cos()
        values = output.reshape(-1).float()
        values = torch.where(values.isfinite(), values, 0.0)
        scores.append((values * weights).sum() / math.sqrt(max(1, output.numel())))
    return torch.stack(scores).sum()
