"""Ranks that take every step together train by one rule: the same optimizers, set alike.

    at set-up        each optimizer of all parameters: its class, and its groups with their numbers
    after 16 steps   the learning rates of each of them, and the numbers as they are now; also
                     before a checkpoint is saved, before an evaluation and, without servers, at
                     the end

Each rank waits for the others in those steps anyway. It costs an all-gather of 16 bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.comm.objects import broadcast_object
from shoal.errors import BadInput
from shoal.replica.optimizers import IMPLEMENTATIONS
from shoal.sync.optimizer_step import OptimizerStep, settings_of

if TYPE_CHECKING:
    from shoal.train.own_loop.optimizer import LoopOptimizer
    from shoal.train.step.step import Step

_EVERY = 16  # steps


def check_same_optimizers(group: Group, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """All ranks call it, each with optimizers of all parameters of the same models."""
    lines = []
    for optimizer in optimizers:
        lines.append(type(optimizer).__name__)
        groups = enumerate(optimizer.param_groups)
        lines += [f"{len(g['params'])} parameters in group {i}" for i, g in groups]
        lines += _numbers_of(optimizer)
    check_same(group, lines)


def check_same(group: Group, lines: Sequence[str], kind: str = "") -> None:
    """Refuse lines that are not the same on all ranks of one `kind`. All ranks call it."""
    if group.size == 1:
        return
    digests = torch.empty(group.size, 2, dtype=torch.int64)
    group.all_gather(digests, torch.tensor([_digest(kind), _digest("\n".join(lines))])).wait()
    first: dict[int, tuple[int, int]] = {}  # of each kind a rank, and the digest of its lines
    for rank, (of_kind, digest) in enumerate(digests.tolist()):
        other, expected = first.setdefault(of_kind, (rank, digest))
        if digest == expected:
            continue
        of_other = broadcast_object(group, list(lines), other)
        of_rank = broadcast_object(group, list(lines), rank)
        pairs = zip_longest(of_other, of_rank, fillvalue="nothing more")
        theirs, its = next(pair for pair in pairs if pair[0] != pair[1])
        raise BadInput(
            f"rank {rank} trains with {its}, and rank {other} with {theirs}: let optimizers and "
            "schedulers follow what is the same on all ranks, such as what job.step, job.backward "
            "and job.evaluate return, or job.mean(loss)"
        )


class SameRules:
    """Compares the optimizers of `loop`, and of steps that are added, while they train."""

    def __init__(self, group: Group, optimizers_of_loop: Sequence[LoopOptimizer]):
        self._group = group
        self._of_loop = optimizers_of_loop
        self._of_steps: list[OptimizerStep] = []
        self._kind: list[str] = []  # ranks that own other parameters may have other groups of them
        self._rates: list[float] = []
        self._shown = ""
        self._noted: list[str] = []  # since ranks were compared last
        self.compares = group.size > 1
        self._waits_at_end = True  # with servers, they tell who has ended before the others

    def add(self, step: Step) -> None:
        """Replicas that do not wait for each other, or that may be lost, are not compared."""
        self.compares &= step.term.lockstep and step.sync.synchronous
        self._waits_at_end &= not step.term.has_servers
        if not step.is_own_loop:
            self._of_steps.append(step.update)
            self._kind += _numbers_of(step.update.optimizer)

    def note(self, step: int) -> None:
        """After each step of the job."""
        if not self.compares:
            return
        rates = [float(g.get("lr", 0.0)) for o in self._optimizers() for g in o.param_groups]
        if rates != self._rates or not self._shown:
            self._rates = rates
            distinct = rates if len(set(rates)) > 1 else rates[:1]
            self._shown = ", ".join(map(_shown, distinct))
        self._noted.append(f"lr {self._shown} in step {step}")
        if len(self._noted) == _EVERY:
            self.compare()

    def compare(self) -> None:
        """All ranks call it."""
        if self.compares:
            numbers = [line for o in self._optimizers() for line in _numbers_of(o)]
            check_same(self._group, self._noted + numbers, "\n".join(self._kind))
            self._noted = []

    def end(self) -> None:
        """All ranks call it, if none of them has failed."""
        if self._waits_at_end:
            self.compare()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [*(o.optimizer for o in self._of_loop), *(o.optimizer for o in self._of_steps)]


def _numbers_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """So far as they have to be the same everywhere: libraries of hosts round differently."""
    return [
        f"{key} {_shown(value)} in group {i}"
        for i, settings in enumerate(settings_of(optimizer))
        for key, value in settings.items()
        if _is_number(value) and key not in IMPLEMENTATIONS
    ]


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return isinstance(value, (bool, int, float, str)) or (
        isinstance(value, Tensor) and value.numel() == 1
    )


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return str(value) if isinstance(value, (bool, str)) else f"{float(value):.6g}"


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
