"""The history checker finds what is wrong, and agrees with a search over all orders."""

from __future__ import annotations

import random
from itertools import permutations

from tests.server.chain.history import NEVER, Added, Observed, violation

VALUES = [0, 1, 4, 5] * 6 + [2, 16]  # a push twice, and one that never was


def test_it_agrees_with_a_search_over_all_orders() -> None:
    rng = random.Random(1)
    verdicts = []
    for _ in range(300):
        added, observed = _random_history(rng)
        verdicts.append(_some_order_explains(added, observed))
        assert (violation(added, observed) is None) == verdicts[-1], (added, observed)
    assert 50 < sum(verdicts) < 250


def _random_history(rng: random.Random) -> tuple[list[Added], list[Observed]]:
    def span() -> tuple[float, float]:
        begin_s, end_s = sorted(rng.sample(range(12), 2))
        return float(begin_s), float(end_s)

    added = [Added(push, *span()) for push in range(2)]
    added = [Added(a.push, a.invoked_s, NEVER) if rng.random() < 0.2 else a for a in added]
    return added, [Observed(rng.choice(VALUES), *span()) for _ in range(rng.randint(1, 3))]


def _some_order_explains(added: list[Added], observed: list[Observed]) -> bool:
    """Wing & Gong by brute force; a push without an answer may also be left out."""
    lost = [a for a in added if a.returned_s == NEVER]
    for left_out in range(1 << len(lost)):
        gone = {a.push for i, a in enumerate(lost) if left_out >> i & 1}
        kept = [a for a in added if a.push not in gone]
        if any(_explains(order) for order in permutations([*kept, *observed])):
            return True
    return False


def _explains(order: tuple[Added | Observed, ...]) -> bool:
    value = 0
    latest_s = -NEVER
    for operation in order:
        if operation.returned_s < latest_s:
            return False
        latest_s = max(latest_s, operation.invoked_s)
        if isinstance(operation, Added):
            value += 1 << 2 * operation.push
        elif operation.value != value:
            return False
    return True
