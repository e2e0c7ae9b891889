"""A model's forward, traced by torch.fx into a list of operations that can be split.

Modules are not traced into, except those that only hold others: the model itself, containers, and
modules around a row of repeated blocks.

    tokens  positions  add  dropout  blocks.0  blocks.1 | blocks.2  blocks.3  norm  linear
    └───────────────────── stage 0 ───────────────────┘ └────────── stage 1 ─────────────┘

A value that is computed before a split point and used behind it goes from stage to stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from shoal.errors import BadInput
from shoal.replica.deferred_init import full_name, is_in
from shoal.replica.pipeline.faithful_trace import arguments_of, traced

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


class TracedForward:
    """The operations of one forward, in order; `given` are the arguments that a batch has."""

    def __init__(self, model: nn.Module, opened: set[str], given: tuple[str, ...]):
        self.model = model
        graph = traced(model, opened, given)
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
            if node.op == "call_module" and is_in(str(node.target), name):
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
    arguments = arguments_of(model)
    required = tuple(p.name for p in arguments if p.default is p.empty)
    return required or tuple(p.name for p in arguments[:1])


def optional_calls(model: nn.Module) -> list[tuple[str, ...]]:
    """Where no argument is required, as in Hugging Face models: the first with each other one.

    Which of them a batch has is not known yet, and all of these calls have to be traceable.
    """
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
