"""Does an optimizer do to a part of the parameters what it does to all of them?

Workers that own some parameters (zero, pp) or slices of them (tp, ep) have an optimizer each. That
is right where an update depends on nothing that other workers have. Tiny tensors tell:

    together   a and b in one optimizer
    apart      an optimizer for a, another for b      parameters depend on each other: a global
                                                      norm, a learned step size, random numbers
    sliced     halves of a, halves of b               elements depend on each other: LAMB, LARS,
                                                      Muon, Shampoo, Adafactor
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.replica.optimizers import is_known_elementwise

PARAM_KEYS = ("params", "param_names")
_SIZES = (4, 6, 2, 2, 2, 2)
_LARGE_SIZES = (96, 200, 2, 2, 2, 2)  # some methods treat large tensors in blocks
_STEPS = 30  # some begin, or compute what is costly, after some steps
_LARGE_STEPS = 2
_LR = 0.01  # a warm-up may start at 0
_RELATIVE = 1e-6
_ABSOLUTE = 1e-12


class Coupling(IntEnum):
    """What an update of one element depends on, besides its own gradients."""

    NONE = 0
    ELEMENTS = 1  # of the same parameter
    PARAMETERS = 2
    UNKNOWN = 3  # the optimizer cannot be tried


@dataclass(frozen=True)
class Pieces:
    """What an optimizer of this worker has: `slices` are parameters that are cut along a dim."""

    has_all_parameters: bool = True
    slices: Mapping[nn.Parameter, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return not self.has_all_parameters or bool(self.slices)


@dataclass(frozen=True)
class _Case:
    """One trial tensor: what it stands for, its dimensions, where it is cut."""

    group: int
    ndim: int
    cut: int | None
    name: str = field(default="", compare=False)

    def numbers(self, sizes: tuple[int, ...], seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(sizes[: self.ndim], generator=generator, dtype=torch.float64)

    def gradient(self, sizes: tuple[int, ...], step: int, number: int) -> Tensor:
        """Nearly the same in all steps, so that learned step sizes grow; cases differ in size."""
        noise = self.numbers(sizes, 1000 * step + number)
        return (self.numbers(sizes, 500 + number) + 0.1 * noise) * (number + 1)

    def slices(self, tensor: Tensor, in_slices: bool) -> list[Tensor]:
        return list(tensor.chunk(2, self.cut)) if in_slices and self.cut is not None else [tensor]

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        whole = [piece.detach() for piece in pieces]
        return torch.cat(whole, self.cut) if len(whole) > 1 and self.cut is not None else whole[0]


Factory = Callable[[Any], torch.optim.Optimizer]
Params = dict[int, list[nn.Parameter]]  # of each case, by its number
Run = dict[int, tuple[Tensor, Tensor]]  # where each case started and ended


def coupling(
    optimizer: torch.optim.Optimizer,
    pieces: Pieces,
    named: Sequence[tuple[str, nn.Parameter]] = (),
    factory: Factory | None = None,
) -> Coupling:
    """What would go wrong with `optimizer` on these pieces; nothing of it is changed.

    `factory` makes one from (name, parameter) pairs, where its class alone cannot.
    """
    if is_known_elementwise(optimizer) or not pieces:
        return Coupling.NONE
    if isinstance(optimizer, torch.optim.LBFGS):
        return Coupling.NONE  # refused where it is used, by its need of a closure
    state = torch.get_rng_state()
    try:
        return _Trial(optimizer, pieces, named, factory).result()
    except Exception:  # whatever an optimizer of another package does on small tensors
        return Coupling.UNKNOWN
    finally:
        if not torch.equal(torch.get_rng_state(), state):
            torch.set_rng_state(state)


def refuse(found: Coupling, name: str, strategy: str) -> None:
    """Raise `BadInput` if an optimizer of this class cannot be used under the strategy."""
    because = {
        Coupling.ELEMENTS: f"{name} updates an element by looking at the whole parameter, and under"
        f" {strategy} a worker has a slice of it: take ddp, zero or ps, or an elementwise optimizer"
        " such as AdamW",
        Coupling.PARAMETERS: f"{name} updates a parameter by looking at others, or by random "
        f"numbers, and under {strategy} a worker has some of them: take ddp, or an optimizer that "
        "looks at each parameter alone, such as AdamW",
        Coupling.UNKNOWN: f"{name} could not be tried on small tensors, to see whether it may "
        f"update the parts that workers have under {strategy}: take ddp, or an optimizer of "
        "torch.optim",
    }
    if found is not Coupling.NONE:
        raise BadInput(because[found])


def like(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> Any:
    """An optimizer of the same class and settings, with other groups."""
    kind: Callable[..., Any] = type(optimizer)
    accepted = inspect.signature(kind).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    defaults = {k: v for k, v in optimizer.defaults.items() if takes_any or k in accepted}
    return kind(groups, **defaults)


class _Trial:
    """Optimizers like a given one, on tiny tensors with the same numbers each time."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        pieces: Pieces,
        named: Sequence[tuple[str, nn.Parameter]],
        factory: Factory | None,
    ):
        self._optimizer = optimizer
        self._pieces = pieces
        self._factory = factory
        self._cases = self._choose({id(p): name for name, p in named})

    def result(self) -> Coupling:
        numbers = range(len(self._cases))
        together = self._run([numbers], _SIZES, _STEPS)
        if not self._pieces.has_all_parameters:
            apart = self._run([[i] for i in numbers], _SIZES, _STEPS)
            if not _same(together, apart):
                return Coupling.PARAMETERS
        return Coupling.NONE if self._is_elementwise() else Coupling.ELEMENTS

    def _is_elementwise(self) -> bool:
        """As far as it is applied to slices."""
        for sizes, steps in ((_SIZES, _STEPS), (_LARGE_SIZES, _LARGE_STEPS)):
            for i, case in enumerate(self._cases):
                if case.cut is None:
                    continue
                whole = self._run([[i]], sizes, steps)
                if not _same(whole, self._run([[i]], sizes, steps, in_slices=True)):
                    return False
        return True

    def _choose(self, names: Mapping[int, str]) -> list[_Case]:
        """One of each kind; two where there is one, so that they can depend on each other."""
        cases = [
            _Case(i, p.dim(), self._pieces.slices.get(p), names.get(id(p), ""))
            for i, group in enumerate(self._optimizer.param_groups)
            for p in group["params"]
        ]
        once = list(dict.fromkeys(cases))
        return once * 2 if len(once) == 1 else once

    def _run(
        self,
        owners: Sequence[Sequence[int]],
        sizes: tuple[int, ...],
        steps: int,
        in_slices: bool = False,
    ) -> Run:
        """Each case is trained by the optimizer of its owner."""
        ends = {}
        for owned in owners:
            starts = {i: self._cases[i].numbers(sizes, i) for i in owned}
            params = {
                i: [nn.Parameter(t.clone()) for t in self._cases[i].slices(starts[i], in_slices)]
                for i in owned
            }
            self._train(self._make(params), params, sizes, steps)
            for i in owned:
                ends[i] = (starts[i], self._cases[i].joined(params[i]))
        return ends

    def _train(self, trial: Any, params: Params, sizes: tuple[int, ...], steps: int) -> None:
        if callable(getattr(trial, "train", None)):  # schedule-free optimizers
            trial.train()
        for step in range(1, steps + 1):
            for i, pieces in params.items():
                gradient = self._cases[i].gradient(sizes, step, i)
                for p, piece in zip(
                    pieces, self._cases[i].slices(gradient, len(pieces) > 1), strict=True
                ):
                    p.grad = piece.clone()
            trial.step()

    def _make(self, params: Params) -> torch.optim.Optimizer:
        try:
            made: torch.optim.Optimizer = like(self._optimizer, self._groups(params))
        except (TypeError, ValueError):
            if self._factory is None:
                raise
            pairs = [(self._cases[i].name, p) for i, pieces in params.items() for p in pieces]
            made = self._factory(iter(pairs))
        has = {id(p) for group in made.param_groups for p in group["params"]}
        if has != {id(p) for pieces in params.values() for p in pieces}:
            raise ValueError("the optimizer has other parameters")
        return made

    def _groups(self, params: Params) -> list[dict[str, Any]]:
        groups = []
        for number, group in enumerate(self._optimizer.param_groups):
            mine = [p for i, some in params.items() if self._cases[i].group == number for p in some]
            settings = {k: v for k, v in group.items() if k not in PARAM_KEYS}
            if settings.get("lr") is not None and not settings["lr"]:
                settings["lr"] = settings.get("initial_lr") or self._optimizer.defaults["lr"] or _LR
            if mine:
                groups.append({"params": mine, **settings})
        return groups


def _same(one: Run, other: Run) -> bool:
    """Equal, in comparison to how far they have moved."""
    for i, (start, end) in one.items():
        moved = float((end - start).abs().max()) if end.numel() else 0.0
        if not torch.allclose(end, other[i][1], 0, _ABSOLUTE + _RELATIVE * moved):
            return False
    return True
