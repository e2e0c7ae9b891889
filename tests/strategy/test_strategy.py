"""Strategies are values: they print, parse, compare, and say what they need."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from shoal.errors import NotBuilt, StrategyError
from shoal.strategy.strategy import Layout, as_strategy, parse
from shoal.strategy.sync_terms import Ddp, Single, Zero
from shoal.strategy.terms import TERMS, ddp, gossip, hogwild, localsgd, mapreduce, pp, ps, tp, zero

DESIGN = {
    "ddp": ddp(),
    'ddp(algorithm="tree", bucket_mb=4)': ddp(algorithm="tree", bucket_mb=4),
    "ps(staleness=4, servers=2)": ps(staleness=4, servers=2),
    "ps(quorum=0.9)": ps(quorum=0.9),
    'ps(mode="async", placement="rank0")': ps(mode="async", placement="rank0"),
    'ps(servers=2, replicas=3, consistency="eventual")': ps(
        servers=2, replicas=3, consistency="eventual"
    ),
    'gossip(graph="torus")': gossip(graph="torus"),
    "hogwild": hogwild(),
    "mapreduce": mapreduce(),
    "localsgd(every=16)": localsgd(every=16),
    "zero(2)": zero(2),
    "tp(2)": tp(2),
    'pp(4, schedule="zb-h1", microbatches=16)': pp(4, schedule="zb-h1", microbatches=16),
    "ddp + tp(2) + pp(2)": ddp() + tp(2) + pp(2),
    "ps(quorum=0.9) + pp(2)": ps(quorum=0.9) + pp(2),
    'gossip(graph="ring") + tp(2)': gossip(graph="ring") + tp(2),
}


@pytest.mark.parametrize("text", DESIGN)
def test_the_design_text_is_the_python_value(text: str) -> None:
    assert parse(text) == as_strategy(DESIGN[text])
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize("name", TERMS)
def test_every_name_parses_and_prints(name: str) -> None:
    text = f"{name}(2)" if name in ("tp", "pp", "ep", "cp") else name
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("ddp()", "ddp"),
        ("  ddp\n", "ddp"),
        ("pp(2)+tp(4)+ddp", "ddp + tp(4) + pp(2)"),
        ("ddp + (pp(2) + tp(4))", "ddp + tp(4) + pp(2)"),
        ("single + tp(2)", "tp(2)"),
        ("zero(1)", "zero"),
        ("zero(stage=3)", "zero(3)"),
        ("tp(size=2, sequence=True)", "tp(2, sequence=True)"),
        ("ddp(bucket_mb=25.0)", "ddp"),
        ("ddp(bucket_mb=4.0)", "ddp(bucket_mb=4)"),
        ("ps(quorum=1.0)", "ps(quorum=1)"),
        ("ps(quorum=3)", "ps(quorum=3)"),
        ("localsgd(every=16)", "localsgd"),
        ("gossip(graph='ring')", "gossip"),
        ("ddp(algorithm='two-level')", 'ddp(algorithm="two-level")'),
        ("tp(2, plan={'b': 'row', 'a': 'column'})", 'tp(2, plan={"a": "column", "b": "row"})'),
        ("pp(2, cuts=('h.3',))", 'pp(2, cuts=["h.3"])'),
        (r"gossip(graph='a \\ \" b.csv')", r'gossip(graph="a \\ \" b.csv")'),
    ],
)
def test_printing_is_canonical(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical
    assert parse(canonical) == parse(text)


# ---- values -------------------------------------------------------------------------------------
def test_order_does_not_matter() -> None:
    assert ddp() + tp(2) + pp(4) == pp(4) + ddp() + tp(2) == tp(2) + (pp(4) + ddp())
    assert hash(ddp() + tp(2)) == hash(tp(2) + ddp())


def test_values_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        ddp().bucket_mb = 4  # type: ignore[misc]
    plan = {"a": "row"}
    part = tp(2, plan=plan)
    plan["b"] = "row"
    assert part.plan == {"a": "row"}


def test_different_options_are_different_values() -> None:
    assert len({as_strategy(text) for text in DESIGN}) == len(DESIGN)
    assert parse("tp(2)") != parse("ddp + tp(2)") != parse("ddp + pp(2)")


# ---- what a strategy means ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "workers", "layout"),
    [
        ("single", 1, Layout(1, 1, 1)),
        ("ddp", 1, Layout(1, 1, 1)),
        ("ddp", 4, Layout(4, 1, 1)),
        ("tp(2)", 2, Layout(1, 2, 1)),
        ("tp(2)", 4, Layout(2, 2, 1)),
        ("ddp + tp(2) + pp(3)", 12, Layout(2, 2, 3)),
        ("ddp + ep(2) + cp(3)", 12, Layout(2, 1, 1, ep=2, cp=3)),
        ("hogwild", 3, Layout(3, 1, 1)),
    ],
)
def test_left_over_workers_become_replicas(text: str, workers: int, layout: Layout) -> None:
    assert parse(text).layout(workers) == layout


@pytest.mark.parametrize(
    ("text", "workers", "sentence"),
    [
        ("tp(2) + pp(2)", 3, "tp(2) + pp(2) needs at least 4 workers, and there are 3"),
        ("tp(2)", 1, "tp(2) needs at least 2 workers, and there is 1"),
        ("ddp + pp(4)", 6, "ddp + pp(4) needs a multiple of 4 workers, and there are 6"),
        ("single", 4, "single runs on one worker, and there are 4: did you mean ddp?"),
        ("ps(quorum=5)", 4, "quorum=5 needs as many workers that push, and there are 4"),
        ("ps(quorum=3) + tp(2)", 4, "quorum=3 needs as many workers that push, and there are 2"),
        ("ddp", 0, "workers=0 must be a whole number from 1"),
        ("ddp", True, "workers=True must be a whole number"),
        ("ddp", 2.0, "workers=2.0 must be a whole number"),
    ],
)
def test_workers_that_do_not_fit_are_refused(text: str, workers: int, sentence: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(text).layout(workers)
    assert sentence in str(caught.value)


def test_without_a_sync_term_more_than_one_replica_means_ddp() -> None:
    assert parse("tp(2)").sync is None
    assert parse("tp(2)").sync_for(1) == Single()
    assert parse("tp(2)").sync_for(2) == Ddp()
    assert parse("zero(2) + tp(2)").sync_for(2) == Zero(2)


SYNCHRONOUS = [
    *("single", "ddp", "zero(3)", "ps", "ps(servers=4)", "ps(staleness=0)", "mapreduce", "tp(2)"),
    *("ps + pp(2)", 'mapreduce(batch="mini")', 'gossip(graph="complete")', "localsgd(every=1)"),
]
RELAXED = [
    *("hogwild", "localsgd", "gossip", "gossip + tp(2)", "ps(quorum=0.9)", "ps(staleness=1)"),
    *('ps(mode="async")', 'gossip(graph="complete", mode="async")', 'ddp(compress="fp16")'),
    *('ps(compress="int8")', 'ddp(compress="topk(0.01)") + pp(2)', "localsgd(every=2)"),
    *('localsgd(every=1, outer="nesterov")', 'localsgd(every=1, compress="int8")'),
]


@pytest.mark.parametrize("text", [*SYNCHRONOUS, *RELAXED])
def test_synchronous_strategies_equal_a_single_device_and_others_do_not(text: str) -> None:
    assert parse(text).is_synchronous is (text in SYNCHRONOUS)


def test_asynchronous_gossip_of_split_replicas_is_refused_by_name() -> None:
    parse('gossip(mode="async") + tp(1)').require_built()
    parse("gossip + tp(2)").require_built()
    with pytest.raises(NotBuilt) as caught:
        parse('gossip(mode="async") + pp(2)').require_built()
    assert 'gossip(mode="async") + pp(2) is not built yet' in str(caught.value)
    assert "take gossip + pp(2)" in str(caught.value)


SERVERS = {
    **{"ps": 1, "ps(servers=3)": 3, "ps(servers=2, replicas=3)": 6, "ps(servers=2) + pp(2)": 2},
    **{'ps(placement="rank0")': 0, 'ps(placement="workers", servers=2)': 0, "tp(2)": 0},
}


@pytest.mark.parametrize("text", SERVERS)
def test_processes_beside_the_workers(text: str) -> None:
    assert parse(text).servers(4) == SERVERS[text]
