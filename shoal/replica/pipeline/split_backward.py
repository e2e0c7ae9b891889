"""A backward in two halves: gradients of the inputs now, those of the weights later.

A weight joins the computation at some node of the autograd graph, alone or behind a chain of nodes
that lead nowhere else (a transposition, a cast):

    loss ── … ── addmm ── … ── addmm ── input          the first half goes along the row and keeps
                  ├ bias        ├ bias                 the gradient that arrives at each junction;
                  └ t ─ weight  └ t ─ weight           the second goes down from the junctions

So nothing is computed twice. Where a weight joins at several junctions, one of which may lie
behind the other, the second half is a whole backward, restricted to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

Node = Any  # torch.autograd.graph.Node
Spot = tuple[Node, int]  # a node and the number of one of its outputs


class Halves:
    """The backward from `roots`, whose gradients are `grads`."""

    def __init__(self, roots: Sequence[Tensor], grads: Sequence[Tensor | None]):
        self._roots = list(roots)
        self._grads = list(grads)
        self._later: Callable[[], list[tuple[Tensor, Tensor]]] = self._whole

    def inputs(self, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of `leaves`."""
        spots, weights = junctions(self._roots, leaves)
        if not self._roots:
            return [None] * len(leaves)
        edges = [] if weights is None else [GradientEdge(*spot) for spot in spots]
        wanted: list[Any] = [*leaves, *edges]
        if not wanted:
            return []
        found = torch.autograd.grad(
            self._roots, wanted, self._grads, retain_graph=True, allow_unused=True
        )
        if weights is not None:
            arrived = found[len(leaves) :]
            self._later = lambda: _from_junctions(edges, arrived, weights)
        return list(found[: len(leaves)])

    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """Each weight that has a gradient, with it; the graph is free afterwards."""
        found = self._later()
        self._roots = []
        self._grads = []
        self._later = list
        return found

    def _whole(self) -> list[tuple[Tensor, Tensor]]:
        if not self._roots:
            return []
        weights = list(dict.fromkeys(_leaves(self._roots)))
        found = torch.autograd.grad(self._roots, weights, self._grads, allow_unused=True)
        return [(w, g) for w, g in zip(weights, found, strict=True) if g is not None]


def junctions(
    roots: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[list[Spot], dict[Node, list[Tensor]] | None]:
    """Where weights join: the outputs of those nodes, and the weights of each.

    None for the weights: one joins at several nodes.
    """
    inputs = {id(leaf) for leaf in leaves}
    starts = _spots_of(roots)
    spots: dict[Spot, None] = {}
    weights: dict[Node, list[Tensor]] = {}
    for node, number in _walk(starts):
        own = [w for child, _ in _next(node) if (w := _weight(child)) is not None]
        own = [w for w in own if id(w) not in inputs]
        alone = _weight(node)
        if alone is not None:  # inside a chain; it counts only where the walk begins
            own = [alone] if (node, number) in starts and id(alone) not in inputs else []
        if own:
            spots[node, number] = None
            weights[node] = list(dict.fromkeys(own))
    joined = [w for own in weights.values() for w in own]
    return list(spots), weights if len(set(joined)) == len(joined) else None


def _from_junctions(
    edges: Sequence[GradientEdge],
    arrived: Sequence[Tensor | None],
    weights: dict[Node, list[Tensor]],
) -> list[tuple[Tensor, Tensor]]:
    found = []
    for node, own in weights.items():
        pairs = [
            (edge, grad)
            for edge, grad in zip(edges, arrived, strict=True)
            if edge.node is node and grad is not None
        ]
        if pairs:
            outputs, grads = zip(*pairs, strict=True)
            down = torch.autograd.grad(outputs, own, grads, allow_unused=True)
            found += [(w, g) for w, g in zip(own, down, strict=True) if g is not None]
    return found


def _spots_of(roots: Sequence[Tensor]) -> list[Spot]:
    return [(edge.node, edge.output_nr) for edge in map(get_gradient_edge, roots)]


def _walk(starts: Sequence[Spot]) -> list[Spot]:
    """Every output of every node that is reached from `starts`, each once."""
    seen = dict.fromkeys(starts)
    waiting = list(starts)
    expanded: set[Node] = set()
    while waiting:
        node, _ = waiting.pop()
        if node in expanded:
            continue
        expanded.add(node)
        for spot in _next(node):
            if spot not in seen:
                seen[spot] = None
                waiting.append(spot)
    return list(seen)


def _next(node: Node) -> list[Spot]:
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


def nodes_behind(roots: Sequence[Tensor]) -> set[Node]:
    """Every node of the graph that some tensors were computed by."""
    return {node for node, _ in _walk(_spots_of(roots))}


def _leaves(roots: Sequence[Tensor]) -> list[Tensor]:
    found = [node.variable for node, _ in _walk(_spots_of(roots)) if hasattr(node, "variable")]
    return [leaf for leaf in found if isinstance(leaf, nn.Parameter)]
