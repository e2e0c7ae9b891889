"""A model whose forward can be traced, split between its operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoal.errors import BadInput
from shoal.replica.deferred_init import full_name, is_in, tensor_slots
from shoal.replica.microbatch_context import preserve_modes
from shoal.replica.pipeline.balance import Choice, balanced_split, best_depth, largest_cost
from shoal.replica.pipeline.faithful_trace import Untraceable, arguments_of, traced
from shoal.replica.split.attributes import Slot, hidden, refusal
from shoal.runtime.pytree import Tree

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


class TracedForward:
    """The operations of one forward, in order; `given` are the arguments that a batch has."""

    def __init__(self, model: nn.Module, opened: set[str], given: tuple[str, ...]):
        self.model = model
        graph = traced(model, opened, given)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.inputs = [node for node in placeholders if node.target in given]
        unused = set(placeholders) - set(self.inputs)
        for node in graph.nodes:  # fx asserts the values of arguments that are not given
            if unused & set(node.all_input_nodes):
                unused.add(node)
        self.nodes = [
            node
            for node in graph.nodes
            if node not in unused and node.op not in ("placeholder", "get_attr")
        ]
        index_of = {node: index for index, node in enumerate(self.nodes)}
        self._last_use = {
            node: max((index_of[user] for user in node.users if user in index_of), default=-1)
            for node in [*self.inputs, *self.nodes]
        }

    def first_call(self, name: str) -> int:
        """The index where the module `name`, or the first one inside it, is called first."""
        for index, node in enumerate(self.nodes):
            if node.op == "call_module" and is_in(str(node.target), name):
                return index
        raise BadInput(f"the model cannot be split at {name!r}: the forward does not call it")

    def live_values(self, index: int) -> list[fx.Node]:
        """The values that are known before the operation `index` and used there or behind."""
        before = [*self.inputs, *self.nodes[:index]]
        return [node for node in before if self._last_use[node] >= index]

    def cost(self, node: fx.Node, seconds: Mapping[str, float] | None = None) -> float:
        """Seconds where they are known; else weights that are not only looked up."""
        if seconds is not None:
            return seconds.get(str(node.target), 0.0) if node.op == "call_module" else 0.0
        if node.op == "call_module":
            module = self.model.get_submodule(str(node.target))
            return sum(weights_of(module))
        if node.target is torch.nn.functional.embedding:
            return 0
        targets = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
        used = [attrgetter(target)(self.model) for target in targets]
        return sum(value.numel() for value in used if isinstance(value, nn.Parameter))

    def is_trained(self, node: fx.Node) -> bool:
        """Whether it calls a module with a parameter to train."""
        if node.op != "call_module":
            return False
        module = self.model.get_submodule(str(node.target))
        return any(p.requires_grad and p.numel() for p in module.parameters())

    def segment(self, start: int, stop: int) -> fx.GraphModule:
        """The operations from `start` to `stop` as a module.

        It takes the values that are live at `start` and returns those that are live at `stop`.
        The last one returns what the model returns.
        """
        graph = fx.Graph()
        known = {}
        for node in self.inputs if start == 0 else self.live_values(start):
            known[node] = graph.placeholder(node.name)

        def copied(node: fx.Node) -> fx.Node:
            if node.op == "get_attr" and node not in known:
                known[node] = graph.node_copy(node)
            return known[node]

        for node in self.nodes[start:stop]:
            known[node] = graph.node_copy(node, copied)
        if stop < len(self.nodes):
            graph.output(tuple(known[node] for node in self.live_values(stop)))
        return fx.GraphModule(self.model, graph, "Stage")


def required_arguments(model: nn.Module) -> tuple[str, ...]:
    """The arguments of a model's forward that have no default; if none has, the first one."""
    arguments = arguments_of(model)
    required = tuple(p.name for p in arguments if p.default is p.empty)
    return required or tuple(p.name for p in arguments[:1])


def optional_calls(model: nn.Module) -> list[tuple[str, ...]]:
    """Without required arguments (Hugging Face): the first with each other, all to be traced."""
    arguments = arguments_of(model)
    if any(p.default is p.empty for p in arguments):
        return []
    return [(arguments[0].name, p.name) for p in arguments[1:] if p.default is None]


def modules_to_open(
    model: nn.Module, cuts: Sequence[str] = (), deeper: int = 0, torch_too: bool = False
) -> set[str]:
    """The names of modules that tracing looks into: those around others, and around the cuts.

    With `deeper`, blocks are opened too, so many levels of them; with `torch_too`, also modules of
    torch.nn around blocks, such as nn.TransformerEncoder.
    """
    opened = {""}

    def visit(name: str, module: nn.Module, deeper: int) -> None:
        kinds = Counter(type(child) for child in module.children())
        for key, child in module.named_children():
            child_name = full_name(name, key)
            is_block = isinstance(module, _CONTAINERS) and kinds[type(child)] > 1
            holds_cut = any(cut_name.startswith(child_name + ".") for cut_name in cuts)
            holds_blocks = not is_block and _is_around_blocks(child, torch_too)
            if holds_cut or _is_container(child) or holds_blocks:
                opened.add(child_name)
                visit(child_name, child, deeper)
            elif deeper > 0 and _is_user_defined(child) and list(child.children()):
                opened.add(child_name)
                visit(child_name, child, deeper - 1)

    visit("", model, deeper)
    return opened


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, _CONTAINERS) and (
        not isinstance(module, nn.Sequential) or type(module).forward is nn.Sequential.forward
    )


def _is_around_blocks(module: nn.Module, torch_too: bool) -> bool:
    return (torch_too or _is_user_defined(module)) and any(
        isinstance(inner, nn.Sequential | nn.ModuleList) and _has_blocks(inner)
        for inner in module.modules()
    )


def _is_user_defined(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.nn.")


def _has_blocks(container: nn.Module) -> bool:
    kinds = Counter(type(child) for child in container.children() if list(child.parameters()))
    return any(count > 1 for count in kinds.values())


def weights_of(module: nn.Module) -> Iterator[int]:
    """The sizes of what a position is multiplied with."""
    for inner in module.modules():
        if not isinstance(inner, _LOOKUPS):
            yield from (p.numel() for p in inner.parameters(recurse=False))


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
        points = [traced.first_call(name) for name in self.cuts]
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
                for node in (used for one in traced.nodes for used in one.all_input_nodes):
                    if node.op == "get_attr" and str(node.target) in names:
                        raise refusal(names[str(node.target)], stage)

    # ------------------------------------------------------------------ cuts of the user

    def _check(self, cuts: Sequence[str]) -> tuple[str, ...]:
        modules = dict(self.model.named_modules())
        for name in cuts:
            if name not in modules or not name:
                raise BadInput(
                    f"cuts={list(cuts)} names {name!r}, and the model has no such module; "
                    f"it has {', '.join(self._candidates())}"
                )
        traced = self._trace(self._required)
        points = [traced.first_call(name) for name in cuts]
        needed = self.virtual_stages - 1
        if len(cuts) != needed or points != sorted(set(points)) or 0 in points:
            raise BadInput(
                f"cuts={list(cuts)}: {self.virtual_stages} stages need {needed} modules, each the "
                "first of a stage, in the order in which forward calls them"
            )
        return tuple(cuts)

    # ------------------------------------------------------------------ chosen cuts

    def _candidates(self) -> dict[str, int]:
        """The modules that can begin a stage, each with the index of its first call."""
        traced = self._trace(self._required)
        first_calls: dict[str, int] = {}
        for index, node in enumerate(traced.nodes):
            if traced.is_trained(node):
                first_calls.setdefault(str(node.target), index)
        return dict(list(first_calls.items())[1:])

    def _choose(self) -> tuple[str, ...]:
        best = best_depth(self._balance)
        self._opened, names = best.row
        self._traced.clear()
        self.cost = best.cost
        return tuple(names[index] for index in best.points)

    def _balance(self, deeper: int) -> Choice:
        self._opened = modules_to_open(self.model, deeper=deeper)
        self._traced.clear()
        traced = self._trace(self._required)
        names = {index: name for name, index in self._candidates().items()}
        costs = [float(traced.cost(node, self._seconds)) for node in traced.nodes]
        prices = [float(len(traced.live_values(index))) for index in names]
        points = balanced_split(costs, list(names), prices, self.virtual_stages)
        return Choice(largest_cost(costs, points), points, (self._opened, names))


def _is_in_graph(error: BaseException) -> bool:
    """Whether an operation between modules has failed, not code inside of one."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and "eval_with_key" in frame.tb_frame.f_code.co_filename
