"""A forward that cannot be traced, cut between the blocks of its trunk.

A trunk is a row of like modules in an nn.ModuleList or nn.Sequential. Each of them is given what
the one before it returned, and besides that the same arguments as the others.

    before ─ blocks.0 ─ blocks.1 │ blocks.2 │ blocks.3 ─ behind
    └──────── stage 0 ─────────┘ └ stage 1 ┘└─── stage 2 ─────┘

The first stage runs the model's forward and leaves it where the next stage's blocks begin. Those
in the middle call their blocks. The last one runs forward again, where the result of its own
blocks stands for that of all of them, and what is computed before the blocks is not used. So what
is outside of the trunk is on the first stage and the last.

That the forward hands on what the blocks return, and does nothing else between them, is looked at
in every forward of the last stage.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.errors import BadInput
from shoal.pytree import Tree, tensors_of
from shoal.replica.deferred_init import full_name
from shoal.replica.microbatch import default_generators
from shoal.replica.pipeline.balance import cut_evenly
from shoal.replica.pipeline.graph_split import weights_of
from shoal.replica.pipeline.split_backward import nodes_behind
from shoal.replica.tensor.sharded_tensor import HERE

_PLAIN = (bool, int, float, str, type(None))
_LOOKS = HERE | {Tensor.shape.__get__, Tensor.size}  # type: ignore[attr-defined]


class _Left(Exception):
    """A forward was left where a block was called with these arguments."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.args_of_block = args
        self.kwargs = kwargs


class Trunk:
    def __init__(self, model: nn.Module, blocks: Sequence[str]):
        self.model = model
        self.names = list(blocks)
        self.blocks = [model.get_submodule(name) for name in blocks]
        self._signature = inspect.signature(model.forward)
        self._is_checked = False

    @classmethod
    def find(cls, model: nn.Module) -> Trunk | None:
        """The row of like modules with the most weights."""
        rows = [
            [full_name(name, own) for own, _ in container.named_children()]
            for name, container in model.named_modules()
            if isinstance(container, nn.ModuleList | nn.Sequential)
            and len({type(child) for child in container.children()}) == 1
            and len(container) > 1
        ]
        sizes = [sum(sum(weights_of(model.get_submodule(n))) for n in row) for row in rows]
        if not rows or not max(sizes):
            return None
        return cls(model, rows[sizes.index(max(sizes))])

    # ------------------------------------------------------------------ where it is cut

    def choose(self, parts: int, seconds: Mapping[str, float] | None = None) -> tuple[str, ...]:
        """Cuts for which the dearest part is as cheap as can be; the head is in the last."""
        if seconds is None:
            costs = [float(sum(weights_of(block))) for block in self.blocks]
            outside = sum(weights_of(self.model)) - sum(costs)
        else:
            costs = [seconds[name] for name in self.names]
            outside = max(0.0, seconds[""] - sum(costs))
        places = list(range(1, len(costs)))
        found = cut_evenly([*costs, outside], places, [1.0] * len(places), parts)
        if found is None:
            raise BadInput(
                f"{type(self.model).__name__} cannot be cut into {parts} parts: its forward "
                f"cannot be traced, and its trunk has {len(costs)} blocks"
            )
        return tuple(self.names[place] for place in found)

    def check(self, cuts: Sequence[str], parts: int) -> tuple[str, ...]:
        places = [self.names.index(cut) if cut in self.names else 0 for cut in cuts]
        if len(cuts) != parts - 1 or places != sorted(set(places)) or 0 in places:
            raise BadInput(
                f"cuts={list(cuts)}: {type(self.model).__name__}, whose forward cannot be traced, "
                f"is cut into {parts} parts at {parts - 1} of {', '.join(self.names[1:])}"
            )
        return tuple(cuts)

    def is_used_by(self, name: str, cuts: Sequence[str], virtual: int) -> bool:
        """Whether a virtual stage uses the tensor of this name."""
        for place, block in enumerate(self.names):
            if name.startswith(block + "."):
                return place in self._range(cuts, virtual)
        return virtual in (0, len(cuts))

    def _range(self, cuts: Sequence[str], virtual: int) -> range:
        edges = [0, *(self.names.index(cut) for cut in cuts), len(self.names)]
        return range(edges[virtual], edges[virtual + 1])

    # ------------------------------------------------------------------ what a stage computes

    def segment(
        self, cuts: Sequence[str], virtual: int, given: tuple[str, ...]
    ) -> Callable[..., Tree]:
        """A function from what crosses to a virtual stage to what crosses from it."""
        own = self._range(cuts, virtual)
        if virtual == 0:
            return lambda *values: self._begin(own.stop, given, values)
        if virtual < len(cuts):
            return lambda *values: self._go_on(own, *values)
        return lambda *values: self._end(own, given, *values)

    def _begin(self, stop: int, given: tuple[str, ...], values: tuple[Any, ...]) -> Tree:
        def leave(*args: Any, **kwargs: Any) -> Any:
            raise _Left(args, kwargs)

        try:
            with _instead({self.blocks[stop]: leave}):
                self._call(given, values)
        except _Left as left:
            if not left.args_of_block or not isinstance(left.args_of_block[0], Tensor):
                raise self._refused(
                    f"calls {self.names[stop]} without a tensor as its first argument"
                ) from None
            return values, left.args_of_block, left.kwargs
        raise self._refused(f"does not call {self.names[stop]}")

    def _go_on(
        self, own: range, values: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tree:
        x, *rest = args
        for place in own:
            x = self.blocks[place](x, *rest, **kwargs)
        return values, (x, *rest), kwargs

    def _end(
        self,
        own: range,
        given: tuple[str, ...],
        values: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tree:
        result = self._go_on(own, values, args, kwargs)[1][0]
        first = torch.is_grad_enabled() and not self._is_checked
        standing_in = _StandingIn(self, result, records=first)
        with _instead(standing_in.calls()), standing_in:
            outputs = self._call(given, values)
        standing_in.check_end()
        if first:
            if standing_in.is_used_behind(outputs):
                raise self._refused("uses behind its blocks what it computes before them")
            self._is_checked = True
        return outputs

    def _call(self, given: tuple[str, ...], values: tuple[Any, ...]) -> Tree:
        pairs = OrderedDict(zip(given, values, strict=True))
        bound = inspect.BoundArguments(self._signature, pairs)
        return self.model(*bound.args, **bound.kwargs)

    def _refused(self, what: str) -> BadInput:
        return BadInput(
            f"the forward of {type(self.model).__name__} cannot be traced, nor cut between its "
            f"blocks {self.names[0]} to {self.names[-1]}, since it {what}: put what is special "
            "into the blocks"
        )


class _StandingIn:
    """One forward in which the blocks are not computed: each returns the result of all of them."""

    def __init__(self, trunk: Trunk, result: Tensor, records: bool):
        self.trunk = trunk
        self.result = result
        self._records = records
        self._called = 0
        self._others: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self._between = ExitStack()

    def __enter__(self) -> None:
        """Before the blocks nothing is trained here, and nothing random is drawn."""
        self._generators = default_generators(self.result.device)
        self._states = [generator.get_state() for generator in self._generators]
        self._trains = torch.is_grad_enabled()
        self._start = _number()
        torch.set_grad_enabled(self._records)

    def __exit__(self, *_: object) -> None:
        self._between.close()
        torch.set_grad_enabled(self._trains)

    def calls(self) -> dict[nn.Module, Callable[..., Any]]:
        return {block: self._stub(place) for place, block in enumerate(self.trunk.blocks)}

    def check_end(self) -> None:
        if self._called != len(self.trunk.blocks):
            raise self.trunk._refused(f"calls {self._called} of them")

    def is_used_behind(self, outputs: Tree) -> bool:
        """Whether the outputs depend on what was computed before the blocks, but not by them."""
        roots = [t for t in tensors_of(outputs) if t.requires_grad]
        return any(self._start <= n._sequence_nr() < self._middle for n in nodes_behind(roots))

    def _stub(self, place: int) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> Tensor:
            self._between.close()
            if place != self._called:
                raise self.trunk._refused("does not call them in their order, each once")
            if place == 0:
                self._begin(args, kwargs)
            elif not args or args[0] is not self.result:
                raise self.trunk._refused(
                    f"gives {self.trunk.names[place]} something else than "
                    "what the block before it returned"
                )
            elif not _same((args[1:], kwargs), self._others):
                raise self.trunk._refused(
                    f"gives {self.trunk.names[place]} other arguments than those before it"
                )
            self._called += 1
            if self._called < len(self.trunk.blocks):
                self._between.enter_context(_Between(self.trunk))
            return self.result

        return stand_in

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._others = args[1:], kwargs
        self._middle = _number()
        torch.set_grad_enabled(self._trains)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)


class _Between(TorchFunctionMode):
    """No tensor is computed with."""

    def __init__(self, trunk: Trunk):
        super().__init__()
        self._trunk = trunk

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _LOOKS:
            name = getattr(func, "__name__", func)
            raise self._trunk._refused(f"computes ({name}) between them")
        return func(*args, **(kwargs or {}))


@contextmanager
def _instead(calls: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """These are called in place of the forward of modules."""
    for module, call in calls.items():
        module.__dict__["forward"] = call
    try:
        yield
    finally:
        for module in calls:
            del module.__dict__["forward"]


def _same(one: Any, other: Any) -> bool:
    """The same tensors and equal plain values in the same places."""
    if isinstance(one, _PLAIN):
        return type(one) is type(other) and one == other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other


def _number() -> int:
    """Nodes of autograd's graph that this thread makes from now on have this number or more."""
    with torch.enable_grad():
        node: Any = (torch.zeros(1, requires_grad=True) * 1).grad_fn
        return int(node._sequence_nr())
