"""The rule, alone: no threads, no tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.server.consistency import (
    MAX_LAG_STEPS,
    ImpossiblePush,
    Ledger,
    LedgerState,
    PushVerdict,
    Rule,
    quorum_of,
)
from shoal.server.model.snapshot import copied, put_back

ADMITTED: PushVerdict = "admitted"
FOLDED: PushVerdict = "folded"
DROPPED: PushVerdict = "dropped"


def arrive(ledger: Ledger, worker: int, step: int) -> PushVerdict:
    """Decide about a push and record it."""
    verdict = ledger.judge(worker, step)
    ledger.record(worker, step, verdict)
    return verdict


def push(ledger: Ledger, worker: int, step: int) -> PushVerdict:
    verdict = arrive(ledger, worker, step)
    if ledger.complete():
        ledger.apply()
    return verdict


@pytest.mark.parametrize(
    ("fraction", "workers", "wanted"),
    [(0.75, 4, 3), (0.9, 4, 4), (0.1, 4, 1), (1.0, 3, 3), (0.3, 10, 3), (0.7, 10, 7), (2, 4, 2)],
)
def test_a_quorum_in_workers(fraction: float, workers: int, wanted: int) -> None:
    assert quorum_of(fraction, workers) == wanted


def test_a_late_push_is_dropped() -> None:
    ledger = Ledger(Rule(4, quorum=3))
    assert [push(ledger, w, 0) for w in (0, 1, 2)] == [ADMITTED] * 3
    assert ledger.version == 1
    assert push(ledger, 3, 0) == DROPPED
    assert not ledger.counted
    assert ledger.outcomes[3] == {ADMITTED: 0, FOLDED: 0, DROPPED: 1}


def test_a_folded_push_is_no_part_of_the_quorum_of_the_next_step() -> None:
    ledger = Ledger(Rule(3, quorum=2, fold=True))
    assert [push(ledger, w, 0) for w in (0, 1)] == [ADMITTED] * 2
    assert push(ledger, 2, 0) == FOLDED
    assert (ledger.version, ledger.folded) == (1, 1)
    assert push(ledger, 2, 1) == ADMITTED
    assert ledger.version == 1
    assert push(ledger, 0, 1) == ADMITTED
    assert (ledger.version, ledger.folded) == (2, 0)


def test_bounded_staleness_by_hand() -> None:
    """k = 1: a worker may be one step ahead of the slowest."""
    ledger = Ledger(Rule(2, staleness=1))
    assert ledger.may_start(0) and ledger.may_start(1) and not ledger.may_start(2)
    push(ledger, 0, 0)
    push(ledger, 0, 1)
    assert not ledger.may_start(2)
    push(ledger, 1, 0)
    assert ledger.may_start(2) and not ledger.may_start(3)
    ledger.lose(1)
    assert ledger.may_start(3)


@pytest.mark.parametrize("rule", [Rule(2), Rule(2, quorum=1), Rule(2, asynchronous=True)])
def test_a_push_that_no_worker_can_have_made_is_refused(rule: Rule) -> None:
    ledger = Ledger(rule)
    with pytest.raises(ImpossiblePush):
        arrive(ledger, 0, 5)
    push(ledger, 0, 0)
    with pytest.raises(ImpossiblePush, match="before"):
        arrive(ledger, 0, 0)
    ledger.lose(1)
    with pytest.raises(ImpossiblePush, match="has left"):
        arrive(ledger, 1, 0)


rules = st.integers(1, 5).flatmap(
    lambda n: st.one_of(
        st.just(Rule(n)),
        st.builds(Rule, st.just(n), quorum=st.integers(1, n), fold=st.booleans()),
        st.builds(Rule, st.just(n), staleness=st.integers(1, 4)),
        st.just(Rule(n, asynchronous=True)),
    )
)


@given(rules, st.data())
def test_workers_in_any_order_never_wait_for_ever(rule: Rule, data: st.DataObject) -> None:
    """Any worker that may go on does; some leave. As long as one is there, one can go on."""
    ledger = Ledger(rule)
    steps = dict.fromkeys(range(rule.workers), 0)
    waiting: set[int] = set()
    for _ in range(60):
        if rule.quorum is not None:  # steps that were done without a worker are left out
            steps = {w: max(s, ledger.version) for w, s in steps.items() if w not in waiting} | {
                w: steps[w] for w in waiting
            }
        waiting = {w for w in waiting if not ledger.may_start(steps[w])}
        ready = sorted(ledger.live - waiting)
        assert ready or not ledger.live
        if not ready:
            break
        worker = data.draw(st.sampled_from(ready))
        if not rule.is_synchronous and data.draw(st.integers(0, 9)) == 0:
            ledger.lose(worker)
            if ledger.complete():
                ledger.apply()
            continue
        if rule.staleness is not None:
            assert steps[worker] - ledger.slowest <= rule.staleness
        push(ledger, worker, steps[worker])
        steps[worker] += 1
        waiting.add(worker)


@given(rules, st.lists(st.integers(0, 4), max_size=60))
def test_every_push_has_one_outcome(rule: Rule, order: list[int]) -> None:
    ledger = Ledger(rule)
    pushes = 0
    for worker in (w % rule.workers for w in order):
        step = ledger.clocks[worker]
        if ledger.may_start(step):
            push(ledger, worker, step)
            pushes += 1
    assert sum(sum(counts.values()) for counts in ledger.outcomes) == pushes


def test_an_asynchronous_worker_that_is_far_behind_leaves_out_steps_up_to_the_fastest() -> None:
    rule = Rule(2, asynchronous=True)
    ledger = Ledger(rule)
    for step in range(MAX_LAG_STEPS + 3):
        assert arrive(ledger, 0, step) == ADMITTED
    passed = [step for step in range(10) if rule.is_too_late(step, 10, ledger.fastest)]
    assert passed == [0, 1, 2]
    assert arrive(ledger, 1, 3) == ADMITTED
    with pytest.raises(ImpossiblePush):
        arrive(ledger, 1, MAX_LAG_STEPS + 4)


def test_steps_left_out_are_those_that_were_not_pushed() -> None:
    ledger = Ledger(Rule(2, asynchronous=True), start=5)
    for step in (5, 6, 7, 8):
        arrive(ledger, 0, step)
    arrive(ledger, 1, 5)
    arrive(ledger, 1, 7)
    assert ledger.skipped(0, to_the_end=True) == 0
    assert ledger.skipped(1, to_the_end=False) == 1, "step 6"
    assert ledger.skipped(1, to_the_end=True) == 2, "and step 8"


def test_updates_of_a_run_are_counted_from_its_checkpoint_on() -> None:
    ledger = Ledger(Rule(1, asynchronous=True))
    ledger.restart(100)
    arrive(ledger, 0, 100)
    ledger.apply()
    copy = Ledger(ledger.rule)
    put_back(copied(LedgerState, ledger), copy)
    assert (copy.version, copy.updates) == (101, 1)
