"""Why tp finds nothing to split in a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.utils import parametrize

from shoal.errors import BadInput
from shoal.replica.tensor.layers.linear_like import linear_like
from shoal.strategy.split_terms import Tp

_KINDS = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention)


class NothingToSplit(BadInput):
    """tp finds no layer of a model that can be split."""

    def __init__(self, tp: Tp, model: nn.Module):
        self.reasons = list(_reasons(model))
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        super().__init__(
            f"{tp} finds nothing to split in {type(model).__name__}{why}: name its layers, as in "
            f'tp({tp.size}, plan={{"blocks.*.up": "column", "blocks.*.down": "row"}})'
        )


def plan_for(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The part of a plan that names modules of this model, one of several."""
    names = [name for name, _ in model.named_modules()]
    return {
        pattern: kind
        for pattern, kind in plan.items()
        if any(fnmatchcase(name, pattern) for name in names)
    }


def _reasons(model: nn.Module) -> Iterator[str]:
    layers = dict(model.named_modules())
    computed = [name for name, layer in layers.items() if _has_computed_weight(layer)]
    if computed:
        yield (
            f"the weight of {_listed(computed)} is computed from other tensors, as by "
            "weight_norm or spectral_norm"
        )
    for name, layer in layers.items():
        base = next((kind for kind in _KINDS if isinstance(layer, kind)), None)
        if base is None or name in computed or linear_like(layer) is not None:
            continue
        if not type(layer).__module__.startswith("torch.nn."):
            yield (
                f"{name} is a {type(layer).__name__}, a subclass of nn.{_public(layer)} with a "
                "forward of its own"
            )
            return


def _has_computed_weight(layer: nn.Module) -> bool:
    is_old = "weight_g" in layer._parameters or "weight_orig" in layer._parameters
    return is_old or parametrize.is_parametrized(layer)


def _public(layer: nn.Module) -> str:
    return next(c.__name__ for c in type(layer).__mro__ if c.__module__.startswith("torch.nn."))


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
