"""Prices come from the schedules alone; the closed forms of the textbooks must agree with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.docs import document, pipeline_document
from shoal.schedules.collectives.catalog import algorithms, build, kinds
from shoal.schedules.collectives.cost import Link, Price, price
from tests.products import few_or_all

ALPHA = 3e-6
BETA = 2e-9
GAMMA = 5e-10
V = 64 * 63 * 61 * 5  # any number will do
EVERY = [(kind, name) for kind in kinds() for name in algorithms(kind)]
CHOSEN_RANKS = (*range(2, 10), 12, 15, 16, 17, 31, 32, 33, 35, 64)
RANKS: Sequence[int] = few_or_all(CHOSEN_RANKS, range(2, 65))


def priced(kind: str, name: str, ranks: int, gamma: float = 0.0) -> Price:
    return price(build(kind, name, ranks), V, Link(ALPHA, BETA, gamma))


def log2(p: int) -> int:
    """Rounded up."""
    return (p - 1).bit_length()


def folds(p: int) -> int:
    """One round before and one after where p is no power of two."""
    return 2 * (p & (p - 1) > 0)


def floor2(p: int) -> int:
    return p.bit_length() - 1


# For p ranks: rounds, and the time as a pair (messages in a row, bytes in a row in units of V).
CLOSED: dict[tuple[str, str], Callable[[int], tuple[int, int, float]]] = {
    ("all_reduce", "naive"): lambda p: (p * (p - 1), p * (p - 1), p * (p - 1)),
    ("all_reduce", "sequential"): lambda p: (p, p * (p - 1), p * (p - 1)),
    ("all_reduce", "direct"): lambda p: (1, p - 1, p - 1),
    ("all_reduce", "star"): lambda p: (2, 2 * (p - 1), 2 * (p - 1)),
    ("all_reduce", "slow_ring"): lambda p: (2 * (p - 1), 2 * (p - 1), 2 * (p - 1)),
    ("all_reduce", "whole_ring"): lambda p: (p - 1, p - 1, p - 1),
    ("all_reduce", "ring"): lambda p: (2 * (p - 1), 2 * (p - 1), 2 * (p - 1) / p),
    ("all_reduce", "tree"): lambda p: (2 * log2(p), 2 * log2(p), 2 * log2(p)),
    ("all_reduce", "doubling"): lambda p: (floor2(p) + folds(p),) * 2 + (floor2(p) + folds(p),),
    ("reduce_scatter", "ring"): lambda p: (p - 1, p - 1, (p - 1) / p),
    ("reduce_scatter", "direct"): lambda p: (1, p - 1, (p - 1) / p),
    ("all_gather", "ring"): lambda p: (p - 1, p - 1, (p - 1) / p),
    ("all_gather", "direct"): lambda p: (1, p - 1, (p - 1) / p),
    ("all_gather", "bruck"): lambda p: (log2(p), log2(p), (p - 1) / p),
    ("broadcast", "tree"): lambda p: (log2(p), log2(p), log2(p)),
    ("broadcast", "star"): lambda p: (1, p - 1, p - 1),
    ("broadcast", "ring"): lambda p: (2 * p - 2, 2 * p - 2, (2 * p - 2) / p),
    ("reduce", "tree"): lambda p: (log2(p), log2(p), log2(p)),
    ("reduce", "star"): lambda p: (1, p - 1, p - 1),
    ("reduce", "ring"): lambda p: (2 * p - 2, 2 * p - 2, (2 * p - 2) / p),
    ("scatter", "star"): lambda p: (1, p - 1, (p - 1) / p),
    ("gather", "star"): lambda p: (1, p - 1, (p - 1) / p),
    ("all_to_all", "shift"): lambda p: (p - 1, p - 1, (p - 1) / p),
    ("all_to_all", "direct"): lambda p: (1, p - 1, (p - 1) / p),
    ("scan", "chain"): lambda p: (p - 1, p - 1, p - 1),
    ("scan", "hillis_steele"): lambda p: (log2(p), log2(p), log2(p)),
    ("exclusive_scan", "chain"): lambda p: (p - 1, p - 1, p - 1),
    ("exclusive_scan", "hillis_steele"): lambda p: (1 + log2(p - 1),) * 2 + (1 + log2(p - 1),),
    ("barrier", "dissemination"): lambda p: (log2(p), log2(p), 0),
    ("barrier", "star"): lambda p: (2, 2 * (p - 1), 0),
    ("barrier", "ring"): lambda p: (2 * (p - 1), 2 * (p - 1), 0),
}


@pytest.mark.parametrize(("kind", "name"), CLOSED)
def test_rounds_and_time_are_the_closed_form(kind: str, name: str) -> None:
    for ranks in RANKS:
        rounds, messages, volume = CLOSED[kind, name](ranks)
        found = priced(kind, name, ranks)
        assert found.rounds == rounds, ranks
        assert found.time_s == pytest.approx(messages * ALPHA + volume * V * BETA), ranks


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
def test_logarithmic_algorithms_on_powers_of_two(ranks: int) -> None:
    share = (ranks - 1) / ranks * V * BETA
    levels = floor2(ranks)
    for kind, name, times in [
        ("all_reduce", "halving", 2),
        ("reduce_scatter", "halving", 1),
        ("all_gather", "doubling", 1),
        ("scatter", "tree", 1),
        ("gather", "tree", 1),
    ]:
        found = priced(kind, name, ranks)
        assert found.rounds == times * levels
        assert found.time_s == pytest.approx(times * (levels * ALPHA + share))
    bruck = priced("all_to_all", "bruck", ranks)
    assert bruck.time_s == pytest.approx(levels * (ALPHA + V / 2 * BETA))


def test_halving_on_other_numbers_of_ranks_adds_a_fold() -> None:
    for ranks in (n for n in RANKS if folds(n)):
        found = priced("all_reduce", "halving", ranks)
        inner = 1 << floor2(ranks)
        assert found.rounds == 2 * floor2(ranks) + 2
        least = 2 * (inner - 1) / inner + 2
        assert least * V <= found.busiest_bytes <= (least + 1) * V


def test_torus_has_the_bytes_of_the_ring_in_fewer_rounds() -> None:
    for rows, columns in [(2, 2), (2, 3), (3, 4), (4, 4), (6, 7), (8, 8)]:
        ranks = rows * columns
        found = priced("all_reduce", "torus", ranks)
        assert found.rounds == 2 * (rows - 1) + 2 * (columns - 1)
        assert found.sent_largest_bytes == pytest.approx(2 * (ranks - 1) / ranks * V)


def test_bytes_are_those_of_the_textbooks() -> None:
    """A ring sends 2(p-1)/p V a rank; a star as much in all, of which its root carries p times."""
    for ranks in RANKS:
        ring, star = (priced("all_reduce", name, ranks) for name in ("ring", "star"))
        exact = 2 * (ranks - 1) / ranks * V
        assert ring.sent_largest_bytes == ring.received_largest_bytes == pytest.approx(exact)
        assert ring.sent_total_bytes == pytest.approx(ranks * exact)
        assert ring.ratio == pytest.approx(1.0)
        added_s = priced("all_reduce", "ring", ranks, GAMMA).time_s - ring.time_s
        assert added_s == pytest.approx((ranks - 1) / ranks * V * GAMMA)
        assert star.sent_total_bytes == pytest.approx(ring.sent_total_bytes)
        assert star.busiest_bytes == pytest.approx(ranks * ring.busiest_bytes)
        for name in ("naive", "sequential", "direct"):
            total = priced("all_reduce", name, ranks).sent_total_bytes
            assert total == pytest.approx(ranks * (ranks - 1) * V)


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_what_is_sent_is_received_and_no_bound_is_beaten(kind: str, name: str) -> None:
    for ranks in (2, 3, 8, 13, 64):
        found = priced(kind, name, ranks)
        assert found.sent_total_bytes == pytest.approx(found.received_total_bytes)
        assert found.ratio is None or found.ratio > 1 - 1e-9


def test_redundancy_is_what_the_notes_say() -> None:
    """Of the vector of each rank, all but one copy, or its piece, is of no use any more."""
    for ranks in RANKS:
        for kind, name, redundant in (
            ("all_reduce", "ring", (ranks - 1) * V),  # the same as one half of the traffic
            ("reduce_scatter", "ring", (ranks - 1) * V),
            ("reduce", "tree", (ranks - 1) * V),
            ("scatter", "tree", (ranks - 1) / ranks * V),
            ("gather", "tree", (ranks - 1) / ranks * V),
            ("scan", "chain", 0),
            ("all_to_all", "shift", 0),
        ):
            assert priced(kind, name, ranks).redundant_bytes == pytest.approx(redundant), kind


def test_extra_memory_is_what_must_be_staged() -> None:
    for ranks in RANKS:
        for kind, name, staged in (
            ("all_reduce", "ring", V / ranks),
            ("all_reduce", "star", (ranks - 1) * V),
            ("all_reduce", "naive", 2 * V),
            ("all_gather", "ring", 0),
            ("all_to_all", "shift", 0),
        ):
            assert priced(kind, name, ranks).extra_memory_bytes == pytest.approx(staged), name


@pytest.mark.whole
@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_1024_ranks_are_generated_and_priced(kind: str, name: str) -> None:
    found = priced(kind, name, 1024)
    assert math.isfinite(found.time_s) and found.rounds > 0


DOCS = Path(__file__).parents[2] / "docs"


def test_the_document_is_what_the_schedules_say() -> None:
    for name, text in (("algorithms", document()), ("pipelines", pipeline_document())):
        written = (DOCS / f"{name}.md").read_text(encoding="utf-8")
        assert written == text, "run: python -m benchmarks.docs"
