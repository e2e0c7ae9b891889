"""What earlier calls of `job.setup` have made: a later one goes on with it.

A script may unfreeze layers, or train with another optimizer, and call `job.setup` again:

    a model that is known    is neither split nor watched again
    a parameter of a part    stays in it; the part has one more optimizer, and each may step
    another parameter        comes into a part of its own

A checkpoint has the state of the latest optimizer of a part.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from shoal.errors import BadInput
from shoal.train.build_optimizer import check_pieces
from shoal.train.loop_optimizer import PartOptimizers, params_of
from shoal.train.loop_part import LoopPart
from shoal.train.prepare_model import PreparedModel
from shoal.train.step_context import StepContext

_Former = tuple["weakref.ref[nn.Parameter]", nn.Parameter]


class EarlierSetups:
    """`prepared` and `parts` of all calls so far, in their order."""

    def __init__(self) -> None:
        self.prepared: list[PreparedModel] = []
        self.parts: list[LoopPart] = []
        self._known: dict[int, nn.Parameter] = {}
        self._former: dict[int, _Former] = {}  # what splitting a model has replaced

    def new_among(self, models: Sequence[nn.Module]) -> list[nn.Module]:
        """Models that were not set up before; BadInput for one of which only some was."""
        known = {id(prepared.model) for prepared in self.prepared}
        return [m for m in models if id(m) not in known and not self._is_covered(m)] + [
            m for m in models if id(m) in known and self._is_grown(m)
        ]

    def _is_covered(self, model: nn.Module) -> bool:
        named = list(model.named_parameters())
        old = [name for name, p in named if id(p) in self._known]
        if old and len(old) < len(named):
            self._refuse_mixture(model, old[0])
        return bool(old)

    def _is_grown(self, model: nn.Module) -> bool:
        named = list(model.named_parameters())
        new = [name for name, p in named if id(p) not in self._known]
        if new:
            raise BadInput(
                f"{new[0]} was added to {type(model).__name__}, or replaced, after it was given to "
                "job.setup: give job.setup the new module by itself, such as "
                "job.setup(model.head, optimizer)"
            )
        return False

    def _refuse_mixture(self, model: nn.Module, name: str) -> None:
        raise BadInput(
            f"{type(model).__name__} has {name}, which an earlier job.setup was given, beside "
            "other parameters: give job.setup its new modules by themselves, such as "
            "job.setup(model.head, optimizer)"
        )

    def give_present(self, optimizer: torch.optim.Optimizer) -> None:
        """It may have been made before a strategy replaced parameters."""
        for group in optimizer.param_groups:
            group["params"] = [self._present(p) for p in group["params"]]

    def _present(self, p: nn.Parameter) -> nn.Parameter:
        old, new = self._former.get(id(p), (None, p))
        return new if old is not None and old() is p else p

    def add(self, prepared: PreparedModel, before: dict[str, nn.Parameter]) -> None:
        """`before` are the parameters of the model before it was prepared."""
        self.prepared.append(prepared)
        for name, p in prepared.model.named_parameters():
            self._known[id(p)] = p
            old = before.get(name)
            if old is not None and old is not p:
                self._former[id(old)] = (weakref.ref(old), p)

    def take_over(
        self, model: nn.Module, factory: PartOptimizers, context: StepContext
    ) -> list[LoopPart]:
        """Parts of `model` of which this optimizer updates parameters from now on."""
        wanted = {id(p) for p in params_of(factory.optimizer)}
        found = [
            part
            for part in self.parts
            if part.step.model is model and any(id(p) in wanted for p in part.params)
        ]
        for part in found:
            _hand_over(part, factory, wanted, context)
        return found


def _hand_over(
    part: LoopPart, factory: PartOptimizers, wanted: set[int], context: StepContext
) -> None:
    update = part.step.update
    if not part.sync.takes_other_optimizers:
        raise BadInput(
            f"under {part.step.term} parameters keep the optimizer of their first job.setup, and "
            f"{type(factory.optimizer).__name__} is a second one for {part.flat.named[0][0]}: "
            "change the settings in optimizer.param_groups, or take ddp"
        )
    names = {id(p): name for name, p in part.flat.named}
    named = [(names[id(p)], p) for p in update.params if id(p) in wanted]
    update.hand_over(factory, named)
    check_pieces(update, part.step.shard, context)
