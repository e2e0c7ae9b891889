"""What the model and the loss are called with, from a batch of any form."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from shoal.data.rows import is_list_of_samples
from shoal.errors import BadInput
from shoal.pytree import tensors_of
from shoal.replica.loss import LossArguments


class CallArguments(NamedTuple):
    """`inputs` as `call_model` takes them, `targets` as `BoundLoss` does."""

    inputs: Any
    targets: Any


class ForwardSignature:
    """Which entries of a dict the forward of a model takes."""

    def __init__(self, model: nn.Module):
        parameters = inspect.signature(model.forward).parameters.values()
        self._model = type(model).__name__
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._names = [p.name for p in parameters if p.kind in named]

    def arguments(self, content: Any, samples: int) -> CallArguments:
        """The arguments for a batch of so many samples."""
        if isinstance(content, Mapping):
            return CallArguments(self._entries(content), LossArguments.optional(content))
        if not isinstance(content, (tuple, list)):
            return CallArguments((content,), LossArguments.optional(content))
        if not content:
            raise BadInput("a batch is empty: it holds no inputs")
        inputs, *others = content
        if is_list_of_samples(inputs, samples):
            inputs = (inputs,)  # one argument; a list of other tensors is one argument each
        if len(others) == 1:
            return CallArguments(inputs, others[0])
        targets = LossArguments(others) if others else LossArguments.optional(content[0])
        return CallArguments(inputs, targets)

    def _entries(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """All that forward names; what only `**kwargs` takes, if it holds tensors."""
        taken = {
            name: value
            for name, value in content.items()
            if name in self._names or (self._takes_any and tensors_of(value))
        }
        if not taken:
            raise BadInput(
                f"the batch is a dict with {', '.join(map(str, content))}, and the forward of "
                f"{self._model} takes {', '.join(self._names) or 'nothing'}: give the entries the "
                "names of its arguments, or make the batch a pair (inputs, targets)"
            )
        return taken
