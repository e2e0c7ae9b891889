"""Groups of activations that have to be split alike, and which of them to split.

Layers that act on each channel by itself, and sums of activations, join their activations into
one group. A convolution or linear layer stands between two groups, that of its input and that of
its output, and one of them at most can be split: it would need all channels of the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Activation:
    """What the plan knows of one: its channels, by segments, and which dimension they are.

    `axis` counts from the right: -1 is the last dimension.
    """

    group: int
    sizes: tuple[int, ...]
    axis: int
    dims: int | None = None

    @property
    def channels(self) -> int:
        return sum(self.sizes)


@dataclass
class _Group:
    units: int = 0  # that a split has to respect: the greatest common divisor
    is_blocked: bool = False


@dataclass
class LayerEdge:
    """A layer between the group of its input and that of its output."""

    source: int | None
    target: int | None
    parameters: int


@dataclass
class ChannelGroups:
    _parents: list[int] = field(default_factory=list)
    _groups: list[_Group] = field(default_factory=list)
    edges: dict[str, LayerEdge] = field(default_factory=dict)  # by the name of the layer

    def new(self, channels: int) -> int:
        self._parents.append(len(self._parents))
        self._groups.append(_Group(channels))
        return len(self._parents) - 1

    def find(self, group: int) -> int:
        while self._parents[group] != group:
            group = self._parents[group]
        return group

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a == b:
            return
        first, second = self._groups[a], self._groups[b]
        first.units = math.gcd(first.units, second.units)
        first.is_blocked |= second.is_blocked
        self._parents[b] = a

    def constrain(self, group: int, units: int) -> None:
        found = self._groups[self.find(group)]
        found.units = math.gcd(found.units, units)

    def block(self, group: int) -> None:
        """It is used by something that needs all channels."""
        self._groups[self.find(group)].is_blocked = True

    def units(self, group: int) -> int:
        return self._groups[self.find(group)].units

    # ------------------------------------------------------------------ which to split

    def chosen(self, ranks: int) -> set[int]:
        """Groups of which no two have a layer between them, with many parameters at their layers.

        That is a maximum weight independent set, by a greedy choice and exchanges.
        """
        layers = self._layers_of(ranks)
        neighbours = self._neighbours(layers)
        weight = {g: sum(self.edges[n].parameters for n in names) for g, names in layers.items()}

        def gain(group: int) -> float:
            return weight[group] / (1 + len(neighbours[group]))

        best: set[int] = set()
        for group in sorted(layers, key=lambda g: (-gain(g), g)):
            if not neighbours[group] & best:
                best.add(group)
        return _exchanged(best, weight, neighbours)

    def _layers_of(self, ranks: int) -> dict[int, set[str]]:
        """The layers at each group that can be split, which are at least two."""
        layers: dict[int, set[str]] = {}
        loops: set[int] = set()
        for name, edge in self.edges.items():
            ends = [self.find(end) for end in (edge.source, edge.target) if end is not None]
            if len(ends) == 2 and ends[0] == ends[1]:
                loops.add(ends[0])
            for end in ends:
                layers.setdefault(end, set()).add(name)
        return {
            group: names
            for group, names in layers.items()
            if len(names) > 1
            and group not in loops
            and not self._groups[group].is_blocked
            and self._groups[group].units >= ranks
            and self._has_both_ends(group, names)
        }

    def _has_both_ends(self, group: int, names: set[str]) -> bool:
        edges = [self.edges[name] for name in names]
        is_source = any(e.source is not None and self.find(e.source) == group for e in edges)
        is_target = any(e.target is not None and self.find(e.target) == group for e in edges)
        return is_source and is_target

    def _neighbours(self, layers: dict[int, set[str]]) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {group: set() for group in layers}
        for edge in self.edges.values():
            ends = {self.find(e) for e in (edge.source, edge.target) if e is not None}
            for end in ends & set(layers):
                found[end] |= (ends & set(layers)) - {end}
        return found


def _exchanged(
    chosen: set[int], weight: dict[int, int], neighbours: dict[int, set[int]]
) -> set[int]:
    """Exchange a group for its neighbours, or neighbours for it, while that gains parameters."""
    total = sum(weight[g] for g in chosen)
    improved = True
    while improved:
        improved = False
        for group in weight:
            other = _toggled(group, chosen, weight, neighbours)
            found = sum(weight[g] for g in other)
            if found > total:
                chosen, total, improved = other, found, True
    return chosen


def _toggled(
    group: int, chosen: set[int], weight: dict[int, int], neighbours: dict[int, set[int]]
) -> set[int]:
    """With this group instead of its neighbours, or the reverse; and all that fits beside."""
    if group in chosen:
        other = chosen - {group}
        barred = {group}
    else:
        other = (chosen - neighbours[group]) | {group}
        barred = set()
    for candidate in sorted(weight, key=lambda g: (-weight[g], g)):
        if candidate not in barred and candidate not in other and not neighbours[candidate] & other:
            other.add(candidate)
    return other
