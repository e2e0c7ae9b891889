"""A model cut into stages: who computes what, who holds which tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.pytree import Tree
from shoal.replica.deferred_init import TensorSlot, tensor_slots
from shoal.replica.microbatch import call_arguments, preserve_modes
from shoal.replica.pipeline.balance import cut_evenly, dearest
from shoal.replica.pipeline.block_split import Trunk
from shoal.replica.pipeline.graph_split import Operations, Untraceable, arguments, open_modules
from shoal.replica.tensor.parallelize import TensorSplit
from shoal.schedules.pipelines.actions import locate

_DEEPEST = 3  # levels of blocks to look into
_MUCH_CHEAPER = 0.85
_SLACK = 0.02  # how much dearer a part may be where fewer values cross the cuts


class Stages:
    """The cut of a model into `stages * chunks` virtual stages.

    Every rank makes it from the whole model, and all come to the same cut. A parameter that
    several stages use (an embedding that is also the head) has several holders. `keep` then lets
    go of what other stages hold: those tensors become shapes without memory.
    """

    tensor: TensorSplit | None = None  # whose activations cross in another form

    def __init__(
        self,
        model: nn.Module,
        stages: int,
        chunks: int = 1,
        cuts: Sequence[str] | None = None,
        seconds: Mapping[str, float] | None = None,
    ):
        """`seconds` are those of the modules' forward, where they were measured."""
        self.model = model
        self.stages = stages
        self.chunks = chunks
        self._seconds = seconds
        self._opened = open_modules(model, cuts or ())
        self._required = arguments(model)
        self._signature = inspect.signature(model.forward)
        self._segments: dict[tuple[Any, ...], Callable[..., Tree]] = {}
        self._operations: dict[tuple[Any, ...], Operations] = {}
        self._trunk: Trunk | None = None
        self.cuts = self._find_cuts(cuts)
        self.aliases = _aliases(model)
        self.holders = self._find_holders()

    @property
    def parts(self) -> int:
        return self.stages * self.chunks

    def segment(self, virtual: int, given: tuple[str, ...] | None = None) -> Callable[..., Tree]:
        """What one virtual stage computes, for batches with these inputs, as training is now."""
        given = self._required if given is None else given
        key = (virtual, given, self.model.training)
        if key not in self._segments and self._trunk is not None:
            self._segments[key] = self._trunk.segment(self.cuts, virtual, given)
        elif key not in self._segments:
            operations = self._trace(given)
            edges = [0, *map(self._place(operations), self.cuts), len(operations.nodes)]
            self._segments[key] = operations.segment(edges[virtual], edges[virtual + 1])
        return self._segments[key]

    def compute(self, virtual: int, given: tuple[str, ...], values: tuple[Any, ...]) -> Tree:
        """What a virtual stage makes of the values that cross to it."""
        segment = self.segment(virtual, given)
        if self.tensor is None:
            return segment(*values)
        outputs = segment(*self.tensor.unpack(values))
        return outputs if virtual == self.parts - 1 else self.tensor.pack(outputs)

    def arrange(self, inputs: Tree) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """The names of the arguments that a batch gives, and what the first stage takes."""
        args, kwargs = call_arguments(inputs)
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise BadInput(f"the model cannot be called with this batch: {error}") from error
        return tuple(bound.arguments), tuple(bound.arguments.values())

    def keep(
        self, stage: int, filled: Iterable[list[TensorSlot]] | None = None
    ) -> list[tuple[str, nn.Parameter]]:
        """Let go of the tensors that `stage` does not use; returns the parameters it holds.

        `filled` hands over one tensor after the other, by its places.
        """
        named = [(n, p) for n, p in self.model.named_parameters() if stage in self.holders[n]]
        if not any(p.requires_grad and p.numel() for _, p in named):
            raise BadInput(
                f"stage {stage} has no parameter to train: choose other cuts than "
                f"{list(self.cuts)}, or fewer stages"
            )
        kept = {name for name, holders in self.holders.items() if stage in holders}
        if filled is None:
            filled = [[slot] for slot in tensor_slots(self.model)]
        for slots in filled:
            for slot in slots:
                if self.aliases[slot.name] not in kept:
                    _replace_by_shape(slot.module, slot.key)
        self._segments.clear()
        return named

    def _find_cuts(self, cuts: Sequence[str] | None) -> tuple[str, ...]:
        try:
            return self._check(cuts) if cuts is not None else self._choose()
        except Untraceable:
            self._trunk = Trunk.find(self.model)
            if self._trunk is None:
                raise
        if cuts is not None:
            return self._trunk.check(cuts, self.parts)
        return self._trunk.choose(self.parts, self._seconds)

    def _trace(self, given: tuple[str, ...]) -> Operations:
        key = (given, self.model.training)
        if key not in self._operations:
            self._operations[key] = Operations(self.model, self._opened, given)
        return self._operations[key]

    def _place(self, operations: Operations) -> Any:
        def place(cut: str) -> int:
            found = operations.place_of(cut)
            if found is None:
                raise BadInput(f"there is no cut at {cut!r}: the forward does not call it here")
            return found

        return place

    def _check(self, cuts: Sequence[str]) -> tuple[str, ...]:
        modules = dict(self.model.named_modules())
        for cut in cuts:
            if cut not in modules or not cut:
                raise BadInput(
                    f"cuts={list(cuts)} names {cut!r}, and the model has no such module; "
                    f"it has {', '.join(self._candidates())}"
                )
        if len(cuts) != self.parts - 1:
            raise BadInput(
                f"{self.parts} parts need {self.parts - 1} cuts, and there are {len(cuts)}: each "
                "names the module that begins a new part"
            )
        operations = self._trace(self._required)
        places = [self._place(operations)(cut) for cut in cuts]
        if places != sorted(set(places)) or 0 in places:
            raise BadInput(f"cuts={list(cuts)} are not in the order in which forward calls them")
        return tuple(cuts)

    def _candidates(self) -> dict[str, int]:
        """The modules that can begin a part, each with the place of its first call.

        Each has something to train, and so has what is before the first of them.
        """
        operations = self._trace(self._required)
        found: dict[str, int] = {}
        for place, node in enumerate(operations.nodes):
            if operations.trains(node):
                found.setdefault(str(node.target), place)
        return dict(list(found.items())[1:])

    def _choose(self) -> tuple[str, ...]:
        """Between blocks, or inside of them where that makes the dearest part much cheaper."""
        chosen: tuple[float, set[str], tuple[str, ...]] | None = None
        for deeper in range(_DEEPEST):
            self._opened = open_modules(self.model, deeper=deeper)
            self._operations.clear()
            try:
                cost, cuts = self._cut_evenly()
            except BadInput:
                if chosen is None and deeper == _DEEPEST - 1:
                    raise
                continue
            if chosen is None or cost < _MUCH_CHEAPER * chosen[0]:
                chosen = cost, self._opened, cuts
        assert chosen is not None
        _, self._opened, cuts = chosen
        self._operations.clear()
        return cuts

    def _cut_evenly(self) -> tuple[float, tuple[str, ...]]:
        """The cost of the dearest part, and the cuts."""
        operations = self._trace(self._required)
        names = {place: name for name, place in self._candidates().items()}
        costs = [float(operations.cost(node, self._seconds)) for node in operations.nodes]
        slight = max(1.0, sum(costs)) * 1e-6  # what has no weights takes some time, too
        costs = [cost + slight for cost in costs]
        prices = [float(len(operations.crossing(place))) for place in names]
        found = cut_evenly(costs, list(names), prices, self.parts, slack=_SLACK)
        if found is None:
            raise BadInput(
                f"{type(self.model).__name__} cannot be cut into {self.parts} parts: its forward "
                f"calls {len(names) + 1} modules with something to train"
            )
        return dearest(costs, found), tuple(names[place] for place in found)

    def _find_holders(self) -> dict[str, tuple[int, ...]]:
        """The stages that use each tensor, in training or evaluation; nobody's is stage 0's."""
        names = {id(tensor): self.aliases[name] for name, tensor in named_tensors(self.model)}
        found: dict[str, set[int]] = {name: set() for name in names.values()}
        with preserve_modes(self.model):
            for training in (True, False):
                self.model.train(training)
                for virtual in range(self.parts):
                    stage = locate(self.stages, virtual).stage
                    for tensor in self._used_by(virtual):
                        if id(tensor) in names:
                            found[names[id(tensor)]].add(stage)
        return {name: tuple(sorted(stages)) or (0,) for name, stages in found.items()}

    def _used_by(self, virtual: int) -> Iterator[Tensor]:
        if self._trunk is None:
            segment = self.segment(virtual)
            assert isinstance(segment, nn.Module)
            yield from (tensor for _, tensor in named_tensors(segment))
            return
        for name, tensor in named_tensors(self.model):
            if self._trunk.is_used_by(name, self.cuts, virtual):
                yield tensor


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for slot in tensor_slots(model):
        yield slot.name, slot.tensor


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every name of a tensor, and the first name of that same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in named_tensors(model)}


def _replace_by_shape(module: nn.Module, own: str) -> None:
    parameter = module._parameters.get(own)
    if parameter is not None:
        shape = torch.empty_like(parameter, device="meta")
        module._parameters[own] = nn.Parameter(shape, requires_grad=parameter.requires_grad)
    else:
        buffer = module._buffers[own]
        assert buffer is not None
        module._buffers[own] = torch.empty_like(buffer, device="meta")
