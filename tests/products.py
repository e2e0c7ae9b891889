"""Products of parameters: `make test` runs a covering part of them, `make check` all of them.

A test with the marker `product` is run, without `--whole`, for a subset of the combinations of
its parameters in which each value of each parameter occurs, and with `product(pairs=True)` each
pair of values of two parameters; with `product(most=3)` for the first three of these, where each
takes seconds. The subset is the same in every run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

_T = TypeVar("_T")

WHOLE_SUITE = "SHOAL_TEST_WHOLE"  # set by --whole, before any test is imported
Combination = Mapping[str, str]  # the value of each parameter, as text


def few_or_all(few: _T, everything: _T) -> _T:
    """The first in `make test`, the second with --whole."""
    return everything if os.environ.get(WHOLE_SUITE) else few


def covering(combinations: Sequence[Combination], pairs: bool) -> list[int]:
    """Positions of combinations that together cover what all of them cover; greedy."""
    open_facts = set().union(*(_facts(c, pairs) for c in combinations))
    chosen: list[int] = []
    while open_facts:
        gains = [len(_facts(c, pairs) & open_facts) for c in combinations]
        best = gains.index(max(gains))
        chosen.append(best)
        open_facts -= _facts(combinations[best], pairs)
    return sorted(chosen)


def _facts(combination: Combination, pairs: bool) -> set[Hashable]:
    items: Iterable[tuple[str, str]] = sorted(combination.items())
    return set(itertools.combinations(items, 2)) if pairs else set(items)
