"""The parameters of a model when its step was made: what comes later would not be trained."""

from __future__ import annotations

from torch import nn

from shoal.errors import BadInput


class KnownParameters:
    """`check` is cheap, so that every step can call it: it compares identities."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.remember()

    def check(self) -> None:
        """Raise `BadInput` if a parameter to train was added or replaced."""
        if all(list(map(id, held.values())) == before for held, before in self._held):
            return
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                raise BadInput(
                    f"{name} was added to {type(self._model).__name__}, or replaced, after "
                    "job.step or job.setup was called, and would not be trained: change the model "
                    "before that; new values of a parameter are copied into it, under "
                    "torch.no_grad()"
                )
        self.remember()

    def remember(self) -> None:
        """What each module holds now; the objects are kept, so that no other gets their id."""
        self._known = {id(p): p for p in self._model.parameters()}
        modules = list(self._model.modules())
        holders = [held for m in modules for held in (m._parameters, m._modules)]
        self._held = [(held, [id(value) for value in held.values()]) for held in holders]
        self._objects = [list(held.values()) for held in holders]
