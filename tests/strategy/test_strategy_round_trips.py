"""Any strategy prints, and parses back to the same value."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.schedules.pipelines.catalog import CATALOG
from shoal.strategy.base import Term
from shoal.strategy.options import GRAPHS
from shoal.strategy.strategy import Strategy, as_strategy, parse
from shoal.strategy.terms import ddp, gossip, hogwild, localsgd, mapreduce, pp, ps, single, tp, zero
from tests.products import few_or_all


def maybe(values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.none() | values


WHOLE = st.integers(1, 10**9)
COMPRESS = maybe(
    st.sampled_from(
        ["fp16", "bf16", "int8", "int4", "onebit", "topk(0.01)", "topk(5e-3)", "topk(1)"]
    )
    | st.integers(1, 999).map(lambda rank: f"powersgd(rank={rank})")
)
NAMES = st.text(min_size=1, max_size=12).filter(str.isprintable)
FLAG = st.booleans()
ROUND = st.sampled_from(["sync", "async"])
QUORUM = st.floats(0, 1, exclude_min=True) | st.integers(1, 10**9)
ADMISSION = st.one_of(
    st.fixed_dictionaries({"update": st.sampled_from(["server", "worker"])}),
    st.fixed_dictionaries({"quorum": QUORUM, "late": st.sampled_from(["drop", "fold"])}),
    st.fixed_dictionaries({"staleness": st.integers(0, 10**9)}),
    st.fixed_dictionaries({"mode": st.just("async")}),
)
PLACE = st.one_of(
    st.fixed_dictionaries({"placement": st.sampled_from(["servers", "workers"]), "servers": WHOLE}),
    st.fixed_dictionaries({"placement": st.just("rank0")}),
)
ps_terms = st.builds(
    lambda admission, place, compress: ps(**admission, **place, compress=compress),
    ADMISSION,
    PLACE,
    COMPRESS,
)
EDGES = st.lists(
    st.tuples(st.integers(0, 999_999), st.sampled_from("->"), st.integers(0, 999_999)), min_size=1
).map(lambda edges: "edges:" + ",".join(f"{a}{mark}{b}" for a, mark, b in edges))
splittable = st.one_of(
    st.builds(single),
    st.builds(
        ddp,
        algorithm=st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,9}", fullmatch=True),
        bucket_mb=WHOLE | st.floats(0, 1e9, exclude_min=True),
        compress=COMPRESS,
    ),
    st.builds(zero, st.integers(1, 3)),
    ps_terms,
    st.builds(
        gossip, graph=st.sampled_from(GRAPHS) | NAMES.map(lambda n: n + ".csv") | EDGES, mode=ROUND
    ),
    st.builds(
        localsgd,
        every=WHOLE,
        outer=maybe(st.sampled_from(["sgd", "nesterov(lr=0.7)", "adam(lr=1e-3, eps=0.1)"])),
        compress=COMPRESS,
    ),
    st.builds(
        localsgd,
        every=st.integers(16, 10**9),
        overlap=st.just(True),
        delay=maybe(st.integers(1, 16)),
    ),
)
unsplittable = st.one_of(
    st.builds(hogwild, momentum=FLAG),
    st.builds(mapreduce, batch=st.sampled_from(["full", "mini"])),
    st.builds(localsgd, every=st.just(16), fragments=st.integers(2, 16), compress=COMPRESS),
)
tps = st.builds(
    tp,
    WHOLE,
    plan=maybe(st.dictionaries(NAMES, st.sampled_from(["column", "row"]), min_size=1, max_size=3)),
    sequence=FLAG,
)
pps = st.builds(
    pp,
    WHOLE,
    schedule=st.sampled_from(list(CATALOG)),
    microbatches=maybe(WHOLE),
    chunks=maybe(WHOLE),
    recompute=FLAG,
    cuts=maybe(st.lists(NAMES, min_size=1, max_size=3)),
)


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    if draw(st.integers(0, 5)) == 0:
        return as_strategy(draw(unsplittable))
    terms: list[Term] = [
        term for term in (draw(maybe(kind)) for kind in (splittable, tps, pps)) if term is not None
    ] or [ddp()]
    terms = draw(st.permutations(terms))
    strategy = as_strategy(terms[0])
    for term in terms[1:]:
        strategy = strategy + term
    return strategy


@given(strategies())
@settings(max_examples=few_or_all(150, 500), deadline=None)
def test_parse_undoes_str(strategy: Strategy) -> None:
    again = parse(str(strategy))
    assert again == strategy and hash(again) == hash(strategy)
    assert str(again) == str(strategy)
    assert str(strategy).isprintable()
