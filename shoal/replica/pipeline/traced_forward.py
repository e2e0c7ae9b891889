"""A model's forward, traced by torch.fx into a list of operations that can be split.

Modules are not traced into, except those that only hold others: the model itself, containers, and
modules around a row of repeated blocks.

    tokens  positions  add  dropout  blocks.0  blocks.1 | blocks.2  blocks.3  norm  linear
    └───────────────────── stage 0 ───────────────────┘ └────────── stage 1 ─────────────┘

A value that is computed before a split point and used behind it goes from stage to stage.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from shoal.errors import BadInput
from shoal.replica.attributes import BufferValues
from shoal.replica.deferred_init import full_name
from shoal.replica.fx_tracing import ThreadTracer, TypeAsked, TypeQuestions, tracing

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
_ATTEMPTS = 3
_TYPES = (torch.Tensor, tuple, list, dict)  # what values of a forward may be
_RANDOM = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "multinomial", "normal", "poisson"),
    *("uniform_", "normal_", "random_", "bernoulli_", "exponential_"),
}


class Untraceable(BadInput):
    """A forward that torch.fx cannot follow."""


class TracedForward:
    """The operations of one forward, in order; `given` are the arguments that a batch has."""

    def __init__(self, model: nn.Module, opened: set[str], given: tuple[str, ...]):
        self.model = model
        graph = _trace(model, opened, given)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.inputs = [node for node in placeholders if node.target in given]
        if len(self.inputs) != len(given):
            known = [str(node.target) for node in placeholders]
            raise BadInput(f"the batch has inputs {list(given)}, and the model takes {known}")
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

    def first_call(self, name: str) -> int | None:
        """The index where the module `name`, or the first one inside it, is called first."""
        for index, node in enumerate(self.nodes):
            if node.op == "call_module" and _is_in(str(node.target), name):
                return index
        return None

    def live_values(self, index: int) -> list[fx.Node]:
        """The values that are known before the operation `index` and used there or behind."""
        before = [*self.inputs, *self.nodes[:index]]
        return [node for node in before if self._last_use[node] >= index]

    def cost(self, node: fx.Node, seconds: Mapping[str, float] | None = None) -> float:
        """Multiplications of one position, about: the weights that are not only looked up.

        Where they are known, the seconds that a module takes.
        """
        if seconds is not None:
            return seconds.get(str(node.target), 0.0) if node.op == "call_module" else 0.0
        if node.op == "call_module":
            module = self.model.get_submodule(str(node.target))
            return sum(weights_of(module))
        if node.target is torch.nn.functional.embedding:
            return 0
        used = [self._attribute(n) for n in node.all_input_nodes if n.op == "get_attr"]
        return sum(value.numel() for value in used if isinstance(value, nn.Parameter))

    def is_trained(self, node: fx.Node) -> bool:
        """Whether it calls a module with a parameter to train."""
        if node.op != "call_module":
            return False
        module = self.model.get_submodule(str(node.target))
        return any(p.requires_grad and p.numel() for p in module.parameters())

    def constants(self) -> set[str]:
        """The names of tensors of modules that operations use."""
        used = (node for one in self.nodes for node in one.all_input_nodes)
        return {str(node.target) for node in used if node.op == "get_attr"}

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

    def _attribute(self, node: fx.Node) -> Any:
        value: Any = self.model
        for name in str(node.target).split("."):
            value = getattr(value, name)
        return value


def required_arguments(model: nn.Module) -> tuple[str, ...]:
    """The arguments of a model's forward that have no default; if none has, the first one."""
    arguments = _arguments(model)
    required = tuple(p.name for p in arguments if p.default is p.empty)
    return required or tuple(p.name for p in arguments[:1])


def optional_calls(model: nn.Module) -> list[tuple[str, ...]]:
    """Where no argument is required, as in Hugging Face models: the first with each other one.

    Which of them a batch has is not known yet, and all of these calls have to be traceable.
    """
    arguments = _arguments(model)
    if any(p.default is p.empty for p in arguments):
        return []
    return [(arguments[0].name, p.name) for p in arguments[1:] if p.default is None]


def _arguments(model: nn.Module) -> list[inspect.Parameter]:
    arguments = inspect.signature(model.forward).parameters.values()
    return [p for p in arguments if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


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


class _Tracer(ThreadTracer):
    def __init__(self, opened: set[str]):
        super().__init__()
        self._opened = opened

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened


def _trace(model: nn.Module, opened: set[str], given: tuple[str, ...]) -> fx.Graph:
    fixed = {p.name: p.default for p in _arguments(model) if p.name not in given}
    if any(default is inspect.Parameter.empty for default in fixed.values()):
        missing = [name for name, value in fixed.items() if value is inspect.Parameter.empty]
        raise BadInput(f"the model takes {', '.join(missing)}, which the batch does not have")
    try:
        with _nothing_kept(model):
            return _traced_without_draws(model, opened, fixed or None)
    except Exception as error:
        raise Untraceable(
            f"the forward of {type(model).__name__} cannot be split into stages, since it "
            f"depends on its input ({_first_line(error)}): put that code into a module of its own, "
            "or make the model an nn.Sequential, or one with an nn.ModuleList of like blocks"
        ) from error


@contextmanager
def _nothing_kept(model: nn.Module) -> Iterator[None]:
    """What the forward keeps as attributes while it is traced are no values."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    buffers = BufferValues(model)
    try:
        yield
        for now, _ in before:
            for key, value in now.items():
                if isinstance(value, fx.Proxy):
                    raise ValueError(f"it sets {key}")
        for name in buffers.restore():
            raise ValueError(f"it changes {name}")
    finally:
        buffers.restore()
        for now, earlier in before:
            for key in [key for key, value in now.items() if isinstance(value, fx.Proxy)]:
                now.pop(key)
                if key in earlier:
                    now[key] = earlier[key]


class _DrewNumbers(Exception):
    def __init__(self) -> None:
        super().__init__("it draws random numbers outside of its modules")


def _traced_without_draws(
    model: nn.Module, opened: set[str], fixed: dict[str, Any] | None
) -> fx.Graph:
    for _ in range(_ATTEMPTS - 1):  # another thread may have drawn Python's numbers meanwhile
        with suppress(_DrewNumbers), tracing, _NothingRandom():
            return _traced_for_any_type(model, opened, fixed)
    with tracing, _NothingRandom():
        return _traced_for_any_type(model, opened, fixed)


def _traced_for_any_type(
    model: nn.Module, opened: set[str], fixed: dict[str, Any] | None
) -> fx.Graph:
    """Where the forward asks for types (`isinstance`), each answer has to give the same trace."""
    with TypeQuestions() as questions:
        graph = _Tracer(opened).trace(model, fixed)
    for answer in _TYPES if questions.asked else ():
        with TypeQuestions(answer):
            other = _Tracer(opened).trace(model, fixed)
        if _operations(other) != _operations(graph):
            raise TypeAsked(f"it asks for the type of {questions.asked}")
    return graph


def _operations(graph: fx.Graph) -> list[str]:
    return [f"{n.op} {n.target} {n.args} {n.kwargs}" for n in graph.nodes]


class _NothingRandom(TorchFunctionMode):
    """Numbers that the forward draws while it is traced would be the same for all batches."""

    def __enter__(self) -> Any:
        self._state = random.getstate()
        self._numpy = _numpy_state()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, *rest: Any) -> None:
        super().__exit__(kind, *rest)  # type: ignore[no-untyped-call]
        if kind is None and (random.getstate(), _numpy_state()) != (self._state, self._numpy):
            raise _DrewNumbers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _RANDOM and not _has_proxy((args, kwargs)):
            raise _DrewNumbers
        return func(*args, **(kwargs or {}))


def _has_proxy(values: Any) -> bool:
    found: list[Any] = []
    fx.node.map_aggregate(values, lambda leaf: found.append(isinstance(leaf, fx.Proxy)))
    return any(found)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else repr(numpy.random.get_state(legacy=False))


def weights_of(module: nn.Module) -> Iterator[int]:
    """The sizes of what a position is multiplied with."""
    for inner in module.modules():
        if not isinstance(inner, _LOOKUPS):
            yield from (p.numel() for p in inner.parameters(recurse=False))


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
