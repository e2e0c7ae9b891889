"""The history checker finds what is wrong, and agrees with a search over all orders."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from tests.server.chain.history import NEVER, Added, Observed, violation

A = Added(0, 0.0, 1.0)
B = Added(1, 2.0, 3.0)


@pytest.mark.parametrize(
    "observed",
    [
        [Observed(0b0001, 2.5, 2.6)],
        [Observed(0b0101, 2.5, 2.6), Observed(0b0101, 2.7, 2.8)],
        [Observed(0b0000, 0.5, 0.6), Observed(0b0001, 0.7, 0.8)],
        [Observed(0b0001, 0.5, 0.9), Observed(0b0000, 0.6, 0.8)],
    ],
)
def test_these_are_linearizable(observed: list[Observed]) -> None:
    assert violation([A, B], observed) is None


@pytest.mark.parametrize(
    "observed, why",
    [
        ([Observed(0b0000, 1.5, 1.6)], "lacks"),
        ([Observed(0b0101, 1.5, 1.6)], "begun later"),
        ([Observed(0b0010, 1.5, 1.6)], "twice"),
        ([Observed(0b10000, 1.5, 1.6)], "never pushed"),
        ([Observed(0b0001, 0.2, 0.3), Observed(0b0000, 0.4, 0.5)], "is older than"),
        ([Observed(0b0100, 0.5, 2.5)], "after it ended"),
    ],
)
def test_these_violations_are_found(observed: list[Observed], why: str) -> None:
    assert why in (violation([A, B], observed) or "")


def test_two_reads_that_order_two_pushes_differently_are_a_violation() -> None:
    both = [Added(0, 0.0, 9.0), Added(1, 0.0, 9.0)]
    observed = [Observed(0b0001, 1.0, 8.0), Observed(0b0100, 1.0, 8.0)]
    assert "each contain" in (violation(both, observed) or "")


def test_a_push_without_an_answer_may_be_there_or_not() -> None:
    lost = Added(0, 0.0, NEVER)
    assert violation([lost], [Observed(0, 5.0, 6.0), Observed(1, 7.0, 8.0)]) is None
    assert violation([lost], [Observed(1, 5.0, 6.0), Observed(0, 7.0, 8.0)]) is not None


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
    return added, [Observed(rng.choice([0, 1, 4, 5]), *span()) for _ in range(rng.randint(1, 3))]


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
