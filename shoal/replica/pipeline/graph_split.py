"""A model whose forward can be traced, split between its operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.pytree import Tree
from shoal.replica.deferred_init import tensor_slots
from shoal.replica.microbatch import preserve_modes
from shoal.replica.pipeline.balance import Choice, balanced_split, best_depth, largest_cost
from shoal.replica.pipeline.faithful_trace import Untraceable
from shoal.replica.pipeline.kept_tensors import Slot, hidden, refusal
from shoal.replica.pipeline.traced_forward import (
    TracedForward,
    modules_to_open,
    required_arguments,
)

_WRONG_TYPE = (AttributeError, IndexError, KeyError, TypeError, ValueError)


class GraphSplit:
    """Split points of a traced forward; `cuts` are the modules that begin a virtual stage."""

    def __init__(
        self,
        model: nn.Module,
        virtual_stages: int,
        cuts: Sequence[str] | None = None,
        seconds: Mapping[str, float] | None = None,
    ):
        """Raises `Untraceable` where torch.fx cannot follow the forward."""
        self.model = model
        self.virtual_stages = virtual_stages
        self._seconds = seconds
        self._required = required_arguments(model)
        self._opened = modules_to_open(model, cuts or ())
        self._traced: dict[tuple[tuple[str, ...], bool], TracedForward] = {}
        self.cost = 0.0  # of the most expensive stage, where the cuts were chosen
        self.cuts = self._check(cuts) if cuts is not None else self._choose()

    def segment(self, virtual: int, given: tuple[str, ...]) -> Callable[..., Tree]:
        """What a virtual stage computes, for batches with these inputs, as training is now."""
        traced = self._trace(given)
        points = [self._split_point(traced, name) for name in self.cuts]
        edges = [0, *points, len(traced.nodes)]
        return traced.segment(edges[virtual], edges[virtual + 1])

    def compute(self, segment: Callable[..., Tree], values: tuple[Any, ...]) -> Tree:
        """What a segment makes of its values; torch.fx would print the error a second time."""
        assert isinstance(segment, nn.Module)
        try:
            return nn.Module.__call__(segment, *values)
        except _WRONG_TYPE as error:
            if not _is_in_graph(error):
                raise
            raise BadInput(
                f"the forward of {type(self.model).__name__}, traced by torch.fx to split it, "
                f"fails on this batch between its modules ({type(error).__name__}: {error}): if "
                "the batch is right on one device, the forward depends on its input; put that "
                "code into a module of its own"
            ) from error

    def tensors_of(self, virtual: int) -> Iterator[Tensor]:
        """The tensors that a virtual stage uses, as training is now."""
        segment = self.segment(virtual, self._required)
        assert isinstance(segment, nn.Module)
        for slot in tensor_slots(segment):
            yield slot.tensor

    def _trace(self, given: tuple[str, ...]) -> TracedForward:
        key = (given, self.model.training)
        if key not in self._traced:
            self._traced[key] = TracedForward(self.model, self._opened, given)
        return self._traced[key]

    def check_constants(self, slots: Sequence[Slot], stage: int) -> None:
        """Code between modules that uses what they set: the trace knows older values alone."""
        if not slots:
            return
        names = {".".join(slot): slot for slot in slots}
        with preserve_modes(self.model), hidden(self.model, slots, stage):
            for given, training in list(self._traced):
                self.model.train(training)
                try:
                    traced = TracedForward(self.model, self._opened, given)
                except Untraceable as error:
                    raise error.__cause__ or error from None
                for used in traced.constants() & set(names):
                    raise refusal(names[used], stage)

    def _split_point(self, traced: TracedForward, name: str) -> int:
        index = traced.first_call(name)
        if index is None:
            raise BadInput(f"the model cannot be split at {name!r}: the forward does not call it")
        return index

    # ------------------------------------------------------------------ cuts of the user

    def _check(self, cuts: Sequence[str]) -> tuple[str, ...]:
        modules = dict(self.model.named_modules())
        for name in cuts:
            if name not in modules or not name:
                raise BadInput(
                    f"cuts={list(cuts)} names {name!r}, and the model has no such module; "
                    f"it has {', '.join(self._candidates())}"
                )
        if len(cuts) != self.virtual_stages - 1:
            raise BadInput(
                f"{self.virtual_stages} stages need {self.virtual_stages - 1} cuts, got "
                f"{len(cuts)}: each names the module that begins a stage"
            )
        traced = self._trace(self._required)
        points = [self._split_point(traced, name) for name in cuts]
        if points != sorted(set(points)) or 0 in points:
            raise BadInput(f"cuts={list(cuts)} are not in the order in which forward calls them")
        return tuple(cuts)

    # ------------------------------------------------------------------ chosen cuts

    def _candidates(self) -> dict[str, int]:
        """The modules that can begin a stage, each with the index of its first call.

        Each has something to train, and so has what is before the first of them.
        """
        traced = self._trace(self._required)
        first_calls: dict[str, int] = {}
        for index, node in enumerate(traced.nodes):
            if traced.is_trained(node):
                first_calls.setdefault(str(node.target), index)
        return dict(list(first_calls.items())[1:])

    def _choose(self) -> tuple[str, ...]:
        errors: list[BadInput] = []

        def opened(deeper: int) -> Choice | None:
            self._open(modules_to_open(self.model, deeper=deeper))
            try:
                return self._balance()
            except BadInput as error:
                errors.append(error)
                return None

        best = best_depth(opened)
        if best is None:
            raise errors[-1]
        self._open(best.row[0])
        self.cost = best.cost
        return tuple(best.row[1][index] for index in best.points)

    def _open(self, names: set[str]) -> None:
        self._opened = names
        self._traced.clear()

    def _balance(self) -> Choice:
        traced = self._trace(self._required)
        names = {index: name for name, index in self._candidates().items()}
        costs = [float(traced.cost(node, self._seconds)) for node in traced.nodes]
        prices = [float(len(traced.live_values(index))) for index in names]
        points = balanced_split(costs, list(names), prices, self.virtual_stages)
        if points is None:
            raise BadInput(
                f"{type(self.model).__name__} cannot be split into {self.virtual_stages} stages: "
                f"its forward calls {len(names) + 1} modules with something to train"
            )
        return Choice(largest_cost(costs, points), points, (self._opened, names))


def _is_in_graph(error: BaseException) -> bool:
    """Whether an operation between modules has failed, not code inside of one."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and "eval_with_key" in frame.tb_frame.f_code.co_filename
