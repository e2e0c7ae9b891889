"""A forward that cannot be traced, split between a row of like blocks.

The blocks are in an nn.ModuleList or nn.Sequential. Each is given what the one before it
returned, and besides that the same arguments as the others.

    before ─ blocks.0 ─ blocks.1 │ blocks.2 │ blocks.3 ─ behind
    └──────── stage 0 ─────────┘ └ stage 1 ┘└─── stage 2 ─────┘

The first stage runs the model's forward and leaves it where the next stage's blocks begin. Those
in the middle call their blocks. The last one runs forward again, where the result of its own
blocks replaces that of all of them (`block_replacement.py`). So what is outside of the blocks is
on the first stage and the last.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.pytree import Tree
from shoal.replica.deferred_init import full_name, tensor_slots
from shoal.replica.pipeline.balance import balanced_split
from shoal.replica.pipeline.block_replacement import BlockReplacement, replaced_forwards
from shoal.replica.pipeline.traced_forward import weights_of


class _LeftForward(Exception):
    """A forward was left where a block was called with these arguments."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.block_args = args
        self.block_kwargs = kwargs


class BlockSplit:
    """`cuts` are the blocks that begin a virtual stage."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        virtual_stages: int,
        cuts: Sequence[str] | None = None,
        seconds: Mapping[str, float] | None = None,
    ):
        self.model = model
        self.names = list(names)
        self.blocks = [model.get_submodule(name) for name in names]
        self.virtual_stages = virtual_stages
        self._signature = inspect.signature(model.forward)
        self._is_checked = False
        self.cuts = self._check(cuts) if cuts is not None else self._choose(seconds)

    @classmethod
    def find(
        cls,
        model: nn.Module,
        virtual_stages: int,
        cuts: Sequence[str] | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> BlockSplit | None:
        """Between the row of like modules with the most weights, if there is one."""
        rows = [
            [full_name(name, key) for key, _ in container.named_children()]
            for name, container in model.named_modules()
            if isinstance(container, nn.ModuleList | nn.Sequential)
            and len({type(child) for child in container.children()}) == 1
            and len(container) > 1
        ]
        sizes = [sum(sum(weights_of(model.get_submodule(n))) for n in row) for row in rows]
        if not rows or not max(sizes):
            return None
        return cls(model, rows[sizes.index(max(sizes))], virtual_stages, cuts, seconds)

    # ------------------------------------------------------------------ where it is split

    def _choose(self, seconds: Mapping[str, float] | None) -> tuple[str, ...]:
        """The most expensive stage is as cheap as possible; the head is in the last."""
        if seconds is None:
            costs = [float(sum(weights_of(block))) for block in self.blocks]
            outside = sum(weights_of(self.model)) - sum(costs)
        else:
            costs = [seconds[name] for name in self.names]
            outside = max(0.0, seconds[""] - sum(costs))
        candidates = list(range(1, len(costs)))
        prices = [1.0] * len(candidates)
        points = balanced_split([*costs, outside], candidates, prices, self.virtual_stages)
        if points is None:
            raise BadInput(
                f"{type(self.model).__name__} cannot be split into {self.virtual_stages} stages: "
                f"its forward cannot be traced, and it has a row of {len(costs)} blocks"
            )
        return tuple(self.names[index] for index in points)

    def _check(self, cuts: Sequence[str]) -> tuple[str, ...]:
        needed = self.virtual_stages - 1
        points = [self.names.index(name) if name in self.names else 0 for name in cuts]
        if len(cuts) != needed or points != sorted(set(points)) or 0 in points:
            raise BadInput(
                f"cuts={list(cuts)}: {type(self.model).__name__}, whose forward cannot be traced, "
                f"is split into {self.virtual_stages} stages at {needed} of "
                f"{', '.join(self.names[1:])}"
            )
        return tuple(cuts)

    def tensors_of(self, virtual: int) -> Iterator[Tensor]:
        """The tensors that a virtual stage uses."""
        for slot in tensor_slots(self.model):
            if self._is_used_by(slot.name, virtual):
                yield slot.tensor

    def _is_used_by(self, name: str, virtual: int) -> bool:
        for index, block in enumerate(self.names):
            if name.startswith(block + "."):
                return index in self._blocks_of(virtual)
        return virtual in (0, len(self.cuts))

    def _blocks_of(self, virtual: int) -> range:
        edges = [0, *(self.names.index(name) for name in self.cuts), len(self.names)]
        return range(edges[virtual], edges[virtual + 1])

    # ------------------------------------------------------------------ what a stage computes

    def segment(self, virtual: int, given: tuple[str, ...]) -> Callable[..., Tree]:
        """A function from what a virtual stage receives to what it sends."""
        blocks = self._blocks_of(virtual)
        if virtual == 0:
            return lambda *values: self._first_stage(blocks.stop, given, values)
        if virtual < len(self.cuts):
            return lambda *values: self._middle_stage(blocks, *values)
        return lambda *values: self._last_stage(blocks, given, *values)

    def _first_stage(self, stop: int, given: tuple[str, ...], values: tuple[Any, ...]) -> Tree:
        def leave(*args: Any, **kwargs: Any) -> Any:
            raise _LeftForward(args, kwargs)

        try:
            with replaced_forwards({self.blocks[stop]: leave}):
                self._call(given, values)
        except _LeftForward as left:
            if not left.block_args or not isinstance(left.block_args[0], Tensor):
                raise self.refused(
                    f"calls {self.names[stop]} without a tensor as its first argument"
                ) from None
            return values, left.block_args, left.block_kwargs
        raise self.refused(f"does not call {self.names[stop]}")

    def _middle_stage(
        self, blocks: range, values: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tree:
        x, *rest = args
        for index in blocks:
            x = self.blocks[index](x, *rest, **kwargs)
        return values, (x, *rest), kwargs

    def _last_stage(
        self,
        blocks: range,
        given: tuple[str, ...],
        values: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tree:
        result = self._middle_stage(blocks, values, args, kwargs)[1][0]
        is_first = torch.is_grad_enabled() and not self._is_checked
        replacement = BlockReplacement(self, result, records=is_first)
        with replaced_forwards(replacement.calls()), replacement:
            outputs = self._call(given, values)
        replacement.check_end()
        if is_first:
            if replacement.is_bypassed(outputs):
                raise self.refused("uses behind its blocks what it computes before them")
            self._is_checked = True
        return outputs

    def _call(self, given: tuple[str, ...], values: tuple[Any, ...]) -> Tree:
        pairs = OrderedDict(zip(given, values, strict=True))
        bound = inspect.BoundArguments(self._signature, pairs)
        return self.model(*bound.args, **bound.kwargs)

    def refused(self, what: str) -> BadInput:
        return BadInput(
            f"the forward of {type(self.model).__name__} cannot be traced, nor split between its "
            f"blocks {self.names[0]} to {self.names[-1]}, since it {what}: put what is special "
            "into the blocks"
        )
