"""Split backward: input gradients now (action I), weight gradients later (action W).

A weight joins the computation at some node of the autograd graph, alone or behind a chain of nodes
that lead nowhere else (a transposition, a cast):

    loss ── … ── addmm ── … ── addmm ── input          I goes along the row and keeps the
                  ├ bias        ├ bias                 gradient that arrives at each junction;
                  └ t ─ weight  └ t ─ weight           W goes down from the junctions

So nothing is computed twice. Where a weight joins at several junctions, one of which may lie
behind the other, W is a full backward, restricted to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

Node = Any  # torch.autograd.graph.Node
NodeOutput = tuple[Node, int]  # a node and the number of one of its outputs
WeightGrads = list[tuple[Tensor, Tensor]]  # a weight and its gradient


class SplitBackward:
    """The backward from `roots`, whose gradients are `grads`."""

    def __init__(self, roots: Sequence[Tensor], grads: Sequence[Tensor | None]):
        self._roots = list(roots)
        self._grads = list(grads)
        self._weight_backward: Callable[[], WeightGrads] = self._full_backward

    def input_grads(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of `inputs`, which are leaves."""
        outputs, weights = junctions(self._roots, inputs)
        if not self._roots:
            return [None] * len(inputs)
        edges = [] if weights is None else [GradientEdge(*output) for output in outputs]
        wanted: list[Any] = [*inputs, *edges]
        if not wanted:
            return []
        grads = torch.autograd.grad(
            self._roots, wanted, self._grads, retain_graph=True, allow_unused=True
        )
        if weights is not None:
            at_junctions = grads[len(inputs) :]
            self._weight_backward = lambda: _from_junctions(edges, at_junctions, weights)
        return list(grads[: len(inputs)])

    def weight_grads(self) -> WeightGrads:
        """Each weight that has a gradient, with it; the graph is free afterwards."""
        weight_grads = self._weight_backward()
        self._roots = []
        self._grads = []
        self._weight_backward = list
        return weight_grads

    def _full_backward(self) -> WeightGrads:
        if not self._roots:
            return []
        weights = [leaf for leaf in leaves_of(self._roots) if isinstance(leaf, nn.Parameter)]
        grads = torch.autograd.grad(self._roots, weights, self._grads, allow_unused=True)
        return [(w, g) for w, g in zip(weights, grads, strict=True) if g is not None]


def junctions(
    roots: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[list[NodeOutput], dict[Node, list[Tensor]] | None]:
    """Outputs of nodes where weights join, and the weights; None if one joins at several."""
    input_ids = {id(leaf) for leaf in inputs}
    starts = _outputs_of(roots)
    outputs: dict[NodeOutput, None] = {}
    weights: dict[Node, list[Tensor]] = {}
    for node, number in _walk(starts):
        joining = [w for child, _ in _next(node) if (w := _weight(child)) is not None]
        joining = [w for w in joining if id(w) not in input_ids]
        end = _weight(node)
        if end is not None:  # inside a chain; it counts only where the walk begins
            joining = [end] if (node, number) in starts and id(end) not in input_ids else []
        if joining:
            outputs[node, number] = None
            weights[node] = list(dict.fromkeys(joining))
    all_weights = [w for joining in weights.values() for w in joining]
    return list(outputs), weights if len(set(all_weights)) == len(all_weights) else None


def _from_junctions(
    edges: Sequence[GradientEdge],
    at_junctions: Sequence[Tensor | None],
    weights: dict[Node, list[Tensor]],
) -> WeightGrads:
    weight_grads = []
    for node, joining in weights.items():
        pairs = [
            (edge, grad)
            for edge, grad in zip(edges, at_junctions, strict=True)
            if edge.node is node and grad is not None
        ]
        if pairs:
            outputs, grads = zip(*pairs, strict=True)
            below = torch.autograd.grad(outputs, joining, grads, allow_unused=True)
            weight_grads += [(w, g) for w, g in zip(joining, below, strict=True) if g is not None]
    return weight_grads


def _outputs_of(roots: Sequence[Tensor]) -> list[NodeOutput]:
    return [(edge.node, edge.output_nr) for edge in map(get_gradient_edge, roots)]


def leaves_of(roots: Sequence[Tensor]) -> dict[Tensor, None]:
    """The tensors that a backward from `roots` adds gradients to, in the order of a walk."""
    nodes = (node for node, _ in _walk(_outputs_of(roots)))
    return dict.fromkeys(node.variable for node in nodes if hasattr(node, "variable"))


def _walk(starts: Sequence[NodeOutput]) -> list[NodeOutput]:
    """Every output of every node that is reached from `starts`, each once."""
    seen = dict.fromkeys(starts)
    waiting = list(starts)
    expanded: set[Node] = set()
    while waiting:
        node, _ = waiting.pop()
        if node in expanded:
            continue
        expanded.add(node)
        for output in _next(node):
            if output not in seen:
                seen[output] = None
                waiting.append(output)
    return list(seen)


def _next(node: Node) -> list[NodeOutput]:
    return [(child, number) for child, number in node.next_functions if child is not None]


def _weight(node: Node) -> Tensor | None:
    """The leaf at the end of the chain that begins at `node`, if it is one."""
    while True:
        if hasattr(node, "variable"):
            leaf: Tensor = node.variable
            return leaf
        children = _next(node)
        if len(children) != 1:
            return None
        node = children[0][0]
