"""Runs with faults: a fixed slice of the seeds of `make rehearse`, and mistakes that it finds."""

from __future__ import annotations

import pytest

from tests.products import few_or_all
from tests.rehearse.faults.found import FOUND
from tests.rehearse.faults.outcome import run
from tests.rehearse.faults.planted import MISTAKES, planted_mistake
from tests.rehearse.faults.scenario import draw


@pytest.mark.parametrize("seed", range(few_or_all(30, 300)))
def test_a_run_with_faults_ends_as_its_rule_allows(seed: int) -> None:
    outcome = run(draw(seed))
    assert outcome.is_good, f"{outcome.ending}: {outcome.said}"


@pytest.mark.parametrize("name", FOUND)
def test_what_was_mended_stays_so(name: str) -> None:
    outcome = run(FOUND[name])
    assert outcome.is_good, f"{outcome.ending}: {outcome.said}"


def test_a_seed_draws_the_same_faults_and_ends_at_the_same_moment() -> None:
    for seed in range(3):
        assert draw(seed) == draw(seed)
        assert run(draw(seed)) == run(draw(seed))


SLOW = [pytest.param("stale-epoch", marks=pytest.mark.whole)]  # 120 virtual seconds of retries


@pytest.mark.parametrize("name", [*sorted(set(MISTAKES) - {"stale-epoch"}), *SLOW])
def test_a_planted_mistake_is_found(name: str) -> None:
    with planted_mistake(name):
        assert not run(draw(MISTAKES[name].found_by)).is_good
    assert run(draw(MISTAKES[name].found_by)).is_good
