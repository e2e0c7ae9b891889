"""ps(replicas=3) with every option: what training ends with when a server ends meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.errors import BadInput
from shoal.server.chain.node import ChainConsistency
from tests.conftest import World
from tests.sync.replicas.chained import (
    CLIPPED,
    DENSE,
    EXACT,
    ONE_HOT,
    ROWS,
    SOME_ROWS,
    STEPS,
    Task,
    Trained,
    launched_chains,
    train,
)

FAULTS: dict[str, tuple[int, int] | None] = {
    "none": None,
    "head": (0, 0),
    "middle": (0, 1),
    "other head": (1, 0),
}
SYNCHRONOUS: dict[str, tuple[Task, str, str]] = {
    "plain": (DENSE, "", ""),
    "clipped": (CLIPPED, "", ""),
    "exact": (EXACT, "", ""),
    "worker": (DENSE, ', update="worker"', ""),
    "int8": (DENSE, ', compress="int8"', ""),
    "powersgd": (DENSE, ', compress="powersgd(rank=2)"', ""),
    "rows": (ROWS, "", ""),
    "rows that come and go": (SOME_ROWS, "", ""),
    "tp": (CLIPPED, "", " + tp(2)"),
    "pp": (DENSE, "", " + pp(2)"),
}
RELAXED = {
    "quorum": ", quorum=0.5",
    "fold": ', quorum=0.5, late="fold"',
    "staleness": ", staleness=2",
    "async": ', mode="async"',
}
OTHERS: dict[str, tuple[Task, str, str]] = {
    "async clipped": (CLIPPED, ', mode="async"', ""),
    "async rows": (SOME_ROWS, ', mode="async"', ""),
    "async int8": (DENSE, ', mode="async", compress="int8"', ""),
    "staleness rows": (ROWS, ", staleness=2", ""),
    "quorum tp": (DENSE, ", quorum=0.5", " + tp(2)"),
    "async pp": (DENSE, ', mode="async"', " + pp(2)"),
}
_undisturbed: dict[str, list[Trained]] = {}


def strategy_of(options: str, split: str, consistency: str = "strong") -> str:
    return f'ps(servers=2, replicas=3, consistency="{consistency}"{options}){split}'


def equal(left: list[Trained], right: list[Trained]) -> bool:
    return all(
        a.losses == b.losses
        and a.weights.keys() == b.weights.keys()
        and all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.whole
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", SYNCHRONOUS)
def test_a_synchronous_run_has_the_bits_of_one_without_loss(
    world: World, monkeypatch: pytest.MonkeyPatch, case: str, fault: str
) -> None:
    task, options, split = SYNCHRONOUS[case]
    strategy = strategy_of(options, split)
    workers = 4 if split else 2
    for victim in ("none", fault):
        if victim == "none" and case in _undisturbed:
            continue
        with launched_chains(monkeypatch, 2) as made:
            found = train(world, task, strategy, workers, made, FAULTS[victim])
        if victim == "none":
            _undisturbed[case] = found
    assert equal(found if fault != "none" else _undisturbed[case], _undisturbed[case])


def counters_of(found: list[Trained]) -> list[dict[str, Any]]:
    return next(trained.report["servers"] for trained in found if trained.report["servers"])


def mass(found: list[Trained]) -> float:
    """Each sample is one-hot: the sum of all weights says which have counted."""
    return -sum(float(weights.sum()) for weights in found[0].weights.values())


@pytest.mark.whole
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rule", RELAXED)
def test_every_acknowledged_push_counts_once(
    world: World, monkeypatch: pytest.MonkeyPatch, rule: str, fault: str
) -> None:
    strategy = strategy_of(RELAXED[rule], "")
    with launched_chains(monkeypatch, 2) as made:
        found = train(world, ONE_HOT, strategy, 2, made, FAULTS[fault])
    leader = counters_of(found)[0]
    share = 0.5 if rule in ("staleness", "async") else 1.0
    assert mass(found) == share * leader["updates"]
    assert leader["updates"] == (2 * STEPS if share == 0.5 else STEPS)
    assert leader["lost_pushes"] == 0


@pytest.mark.whole
@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rule", [*RELAXED, "synchronous"])
def test_what_an_eventual_head_has_acknowledged_is_there_or_counted_as_lost(
    world: World, monkeypatch: pytest.MonkeyPatch, rule: str, fault: str, lost: int
) -> None:
    consistency: ChainConsistency = "eventual"
    strategy = strategy_of(RELAXED.get(rule, ""), "", consistency)
    is_head = "head" in fault
    with launched_chains(monkeypatch, 2, consistency=consistency) as made:
        found = train(world, ONE_HOT, strategy, 2, made, FAULTS[fault], lost if is_head else 0)
    counters = counters_of(found)
    share = 0.5 if rule in ("staleness", "async") else 1.0
    pushes_lost = sum(server["lost_pushes"] for server in counters)
    most = 2 * STEPS * 0.5
    assert most - 1.0 * pushes_lost <= mass(found) <= most
    if share == 0.5 and fault == "head":
        assert mass(found) == share * (2 * STEPS - counters[0]["lost_pushes"])
    if not is_head:
        assert pushes_lost == 0
    for trained in found[1:]:
        for name, weights in trained.weights.items():
            assert torch.equal(weights, found[0].weights[name])


@pytest.mark.whole
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("consistency", ["strong", "eventual"])
@pytest.mark.parametrize("case", OTHERS)
def test_training_goes_on(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    consistency: ChainConsistency,
    fault: str,
) -> None:
    task, options, split = OTHERS[case]
    strategy = strategy_of(options, split, consistency)
    with launched_chains(monkeypatch, 2, consistency=consistency) as made:
        found = train(world, task, strategy, 4 if split else 2, made, FAULTS[fault])
    assert all(len(trained.losses) == STEPS for trained in found)
    for name, weights in found[0].weights.items():
        assert split or torch.equal(weights, found[1].weights[name])


def test_rows_are_the_same_when_a_head_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One server with two replicas: what every run of the tests tries."""
    found = []
    for crash in (None, (0, 0)):
        with launched_chains(monkeypatch, 1, replicas=2) as made:
            found.append(train(world, SOME_ROWS, "ps(replicas=2)", 2, made, crash))
    assert equal(*found)


def test_exact_sums_need_strong_consistency(world: World) -> None:
    with pytest.raises(BadInput, match=r'exact=True needs every push .* use consistency="strong"'):
        train(world, EXACT, 'ps(replicas=2, consistency="eventual")', 1)
