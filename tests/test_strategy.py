"""Strategies are values: they print, parse back, compare, and nonsense is refused by name."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import strategy as notation
from shoal.errors import BadInput, NotBuilt, StrategyError
from shoal.strategy import (
    BUILT,
    GRAPHS,
    MAX_TEXT,
    PARTS,
    SCHEDULES,
    Ddp,
    Layout,
    Part,
    Single,
    Strategy,
    Zero,
    as_strategy,
    ddp,
    gossip,
    hogwild,
    localsgd,
    mapreduce,
    parse,
    pp,
    ps,
    require_built,
    single,
    tp,
    zero,
)

DESIGN = {
    "ddp": ddp(),
    'ddp(algorithm="tree", bucket_mb=4)': ddp(algorithm="tree", bucket_mb=4),
    "ps(staleness=4, servers=2)": ps(staleness=4, servers=2),
    "ps(quorum=0.9)": ps(quorum=0.9),
    'ps(mode="async", placement="rank0")': ps(mode="async", placement="rank0"),
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


@pytest.mark.parametrize("name", PARTS)
def test_every_name_parses_and_prints(name: str) -> None:
    text = f"{name}(2)" if name in ("tp", "pp") else name
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


# ---- nonsense -----------------------------------------------------------------------------------
NONSENSE = {
    "": "the strategy is empty",
    "  \n": "the strategy is empty",
    "dpp": "unknown strategy 'dpp'; did you mean 'ddp'?",
    "DDP": "unknown strategy 'DDP'; did you mean 'ddp'?",
    "local_sgd": "did you mean 'localsgd'?",
    "xyzzy": "unknown strategy 'xyzzy'; the strategies are single, ddp, zero",
    "ddp(bucketmb=4)": "ddp has no option 'bucketmb'; did you mean 'bucket_mb'?",
    "ddp(x=4)": "ddp has no option 'x'; the options are algorithm, bucket_mb, compress",
    "single(x=4)": "single has no option 'x'; it has no options",
    "ddp(**{})": "ddp has no option '**'",
    "ddp(4)": "ddp takes no value without a name",
    "ddp(*[4])": "ddp takes no value without a name",
    "tp(*[4])": "tp: size=*[4] is not a literal value",
    "zero(1, 2)": "zero takes only stage without a name",
    "zero(1, stage=2)": "zero: stage is given twice",
    "ddp(bucket_mb=1, bucket_mb=2)": "ddp: bucket_mb is given twice",
    "tp": "tp needs a size, as in tp(2)",
    "pp(schedule='gpipe')": "pp needs a size, as in pp(2)",
    "tp(0)": "tp: size=0 is not allowed; size must be a whole number from 1",
    "tp(-1)": "tp: size=-1 is not allowed",
    "tp(True)": "tp: size=True is not allowed",
    "tp(2.0)": "tp: size=2.0 is not allowed",
    "tp(10**9)": "not a literal value",
    "tp(1000000001)": "from 1 to 1000000000",
    "tp(0x" + "f" * 9000 + ")": "tp: size=(int) is not allowed",
    "tp(" + "9" * 9000 + ")": "cannot read",
    "zero(4)": "zero: stage=4 is not allowed; stage must be one of 1, 2, 3",
    "zero(True)": "zero: stage=True is not allowed",
    "ddp(bucket_mb=0)": "ddp: bucket_mb=0 is not allowed; bucket_mb must be a number above 0",
    "ddp(bucket_mb=1e999)": "bucket_mb=inf is not allowed",
    "ddp(bucket_mb='4')": 'bucket_mb="4" is not allowed',
    "ddp(bucket_mb=True)": "bucket_mb=True is not allowed",
    "ddp(algorithm=3)": "algorithm=3 is not allowed; algorithm must be a name",
    "ddp(algorithm='')": "algorithm must be a name",
    "ddp(algorithm=None)": "algorithm=None is not allowed",
    "ddp(compress='zip')": 'compress="zip" is not allowed; compress must be None or "fp16"',
    "ddp(compress='topk')": "compress must be",
    "ddp(compress='topk(0)')": "compress must be",
    "ddp(compress='topk(2)')": "compress must be",
    "ddp(compress='powersgd(rank=0)')": "compress must be",
    "ddp(compress='fp16\\n')": "compress must be",
    "ps(mode='later')": 'mode="later" is not allowed; mode must be one of "sync", "async"',
    "ps(mode=sync)": "mode=sync is not a literal value",
    "ps(mode=__import__('os').getcwd())": "is not a literal value",
    "ps(mode=[{}])": "mode=[{}] is not allowed",
    "ps(mode={[]: 1})": "is not a literal value",
    "ps(quorum=0)": "quorum must be None or a number above 0 and at most 1",
    "ps(quorum=1.1)": "quorum=1.1 is not allowed",
    "ps(staleness=-1)": "staleness=-1 is not allowed",
    "ps(mode='async', quorum=0.5)": 'ps: quorum and mode="async" exclude each other',
    "ps(mode='async', staleness=1)": 'ps: staleness and mode="async" exclude each other',
    "ps(quorum=0.5, staleness=0)": "ps: quorum and staleness exclude each other",
    "ps(late='fold')": 'ps: late="fold" needs quorum',
    "ps(update='worker', quorum=0.5)": 'ps: update="worker" and quorum exclude each other',
    "ps(servers=2, placement='rank0')": "rank 0 has room for one server",
    "gossip(graph='blob')": "graph must be one of ring, torus",
    "gossip(graph='.txt')": "graph must be one of ring, torus",
    "gossip(graph='a\\nb.txt')": r'graph="a\nb.txt" is not allowed',
    "gossip(graph='\\ud800.txt')": r'graph="\ud800.txt" is not allowed',
    "hogwild(momentum=1)": "momentum=1 is not allowed; momentum must be True or False",
    "mapreduce(batch='half')": 'batch must be one of "full", "mini"',
    "localsgd(every=0)": "every=0 is not allowed",
    "localsgd(outer='nesterov(')": "outer must be None or an optimizer such as",
    "localsgd(outer='nesterov(lr=..)')": "outer must be",
    "tp(2, plan={})": "plan must be None or a dict",
    "tp(2, plan={'a': 'diagonal'})": 'plan={"a": "diagonal"} is not allowed',
    "tp(2, plan={1: 'row'})": "plan must be",
    "tp(2, plan={'a': 'row', 'a': 'column'})": "tp: plan names a key twice",
    "pp(2, schedule='1b1f')": 'schedule must be one of "inter-op", "gpipe", "1f1b"',
    "pp(2, microbatches=0)": "microbatches=0 is not allowed",
    "pp(2, cuts='abc')": "cuts must be None or a list of module names",
    "pp(2, cuts=[1])": "cuts=[1] is not allowed",
    "ddp + ps": "ddp + ps: a strategy has at most one way to agree",
    "ddp + ddp": "ddp + ddp: a strategy has at most one way to agree",
    "single + ddp": "single + ddp: a strategy has at most one way to agree",
    "tp(2) + tp(4)": "tp(2) + tp(4): a strategy has at most one tp",
    "pp(2) + ddp + pp(2)": "pp(2) + pp(2): a strategy has at most one pp",
    "hogwild + pp(2)": "hogwild + pp makes no sense: each worker runs the whole model",
    "tp(2) + hogwild": "hogwild + tp makes no sense",
    "mapreduce + tp(2)": "mapreduce + tp makes no sense: a map task is the whole model",
    "mapreduce + pp(2)": "mapreduce + pp makes no sense",
    "ddp - tp(2)": "cannot read 'ddp - tp(2)' as a part of a strategy",
    "+ddp": "cannot read '+ddp' as a part of a strategy",
    "shoal.ddp()": "cannot read 'shoal.ddp()' as a part of a strategy",
    "ddp()()": "cannot read 'ddp()()' as a part of a strategy",
    "'ddp'": "as a part of a strategy",
    "3": "cannot read '3' as a part of a strategy",
    "lambda: ddp": "as a part of a strategy",
    "(x := ddp)": "as a part of a strategy",
    "f'{ddp}'": "as a part of a strategy",
    "ddp +": 'cannot read "ddp +" as a strategy: invalid syntax',
    "ddp(": "'(' was never closed",
    "ddp; ddp": "cannot read",
    "ddp tp(2)": "cannot read",
    "import os": "cannot read",
    "ps(mode=async)": "cannot read",
    "ddp\0": "cannot read",
    "ddp\ud800": r'cannot read "ddp\ud800" as a strategy',
    "ddp +\n tp(2)": r'cannot read "ddp +\n tp(2)" as a strategy',
    "d" * (MAX_TEXT + 1): "longer than 10000 characters",
    "d" * MAX_TEXT: "unknown strategy 'ddd",
    "ps(mode=" + "[" * 150 + "]" * 150 + ")": "mode=[[[",
}
# How deep Python's own parser goes differs between versions, and so does the sentence.
DEEP = [
    "(" * 4000 + "ddp" + ")" * 4000,
    "[" * 4000 + "]" * 4000,
    "-" * 9000 + "1",
    "tp(" + "-" * 9000 + "1)",
    "tp(" + "-" * 900 + "1)",
    "tp(" + "not " * 2000 + "1)",
    "a." * 4000 + "b",
    "a." * 400 + "b",
    "ddp" + "()" * 4000,
    "ddp+" * 2000 + "ddp",
    "ddp+(" * 80 + "ddp" + ")" * 80,
    "tp(" + "1+" * 4000 + "1)",
    "lambda: " * 1200 + "1",
]


@pytest.mark.parametrize("text", [*NONSENSE, *DEEP], ids=lambda text: ascii(text[:40]))
def test_nonsense_is_refused_in_one_sentence(text: str) -> None:
    started = time.perf_counter()
    with pytest.raises(StrategyError) as caught:
        parse(text)
    message = str(caught.value)
    assert NONSENSE.get(text, "") in message
    assert len(message) < 400 and "\n" not in message
    message.encode()  # can be printed anywhere
    assert time.perf_counter() - started < 5


def test_nonsense_in_a_thread_with_its_smaller_stack_is_refused_too() -> None:
    refused = []

    def refuse_all() -> None:
        for text in [*NONSENSE, *DEEP]:
            with pytest.raises(StrategyError):
                parse(text)
            refused.append(text)

    thread = threading.Thread(target=refuse_all)
    thread.start()
    thread.join()
    assert refused == [*NONSENSE, *DEEP]


@given(st.text(max_size=40) | st.text("dp+tps(){}[]=,0123'\". \n\\", max_size=60))
@settings(max_examples=500, deadline=None)
def test_any_text_parses_or_is_a_strategy_error(text: str) -> None:
    try:
        value = parse(text)
    except StrategyError:
        return
    assert parse(str(value)) == value


@pytest.mark.parametrize("value", [None, 3, b"ddp", ["ddp"], Ddp])
def test_only_text_parts_and_strategies_name_a_strategy(value: object) -> None:
    with pytest.raises(StrategyError, match="a strategy is text such as"):
        as_strategy(value)  # type: ignore[arg-type]


def test_python_values_are_checked_like_text() -> None:
    with pytest.raises(StrategyError, match="bucket_mb=-1 is not allowed"):
        ddp(bucket_mb=-1)
    with pytest.raises(StrategyError, match="bucket_mb=nan is not allowed"):
        ddp(bucket_mb=float("nan"))
    with pytest.raises(StrategyError, match=r"bucket_mb=\(int\) is not allowed"):
        ddp(bucket_mb=10**5000)
    with pytest.raises(StrategyError, match=r"ddp \+ zero\(3\): a strategy has at most one way"):
        ddp() + zero(3)
    with pytest.raises(StrategyError, match="made of parts"):
        Strategy("ddp")  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="has a part"):
        Strategy()
    with pytest.raises(TypeError):
        ddp() + "tp(2)"  # type: ignore[operator]


def test_a_strategy_too_long_to_be_read_back_is_refused() -> None:
    with pytest.raises(StrategyError, match="at most 10000 characters"):
        as_strategy(pp(2, cuts=["layer"] * 2000))


def test_strategy_errors_are_bad_input() -> None:
    assert issubclass(StrategyError, BadInput) and issubclass(NotBuilt, BadInput)


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


def test_options_are_typed_attributes() -> None:
    strategy = parse('ddp(bucket_mb=4) + tp(2, plan={"a": "row"}) + pp(3, cuts=["b", "c"])')
    assert isinstance(strategy.sync, Ddp) and strategy.sync.bucket_mb == 4
    assert strategy.tp is not None and strategy.tp.plan == {"a": "row"}
    assert strategy.pp is not None and strategy.pp.cuts == ("b", "c")
    assert [part.name for part in strategy.parts] == ["ddp", "tp", "pp"]


# ---- round trips --------------------------------------------------------------------------------
def maybe(values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.none() | values


WHOLE = st.integers(1, 10**9)
COMPRESS = maybe(
    st.sampled_from(["fp16", "bf16", "int8", "onebit", "topk(0.01)", "topk(5e-3)", "topk(1)"])
    | st.integers(1, 999).map(lambda rank: f"powersgd(rank={rank})")
)
NAMES = st.text(min_size=1, max_size=12).filter(str.isprintable)
FLAG = st.booleans()
ROUND = st.sampled_from(["sync", "async"])
FRACTION = st.floats(0, 1, exclude_min=True)
ADMISSION = st.one_of(
    st.fixed_dictionaries({"update": st.sampled_from(["server", "worker"])}),
    st.fixed_dictionaries({"quorum": FRACTION, "late": st.sampled_from(["drop", "fold"])}),
    st.fixed_dictionaries({"staleness": st.integers(0, 10**9)}),
    st.fixed_dictionaries({"mode": st.just("async")}),
)
PLACE = st.one_of(
    st.fixed_dictionaries({"placement": st.sampled_from(["servers", "workers"]), "servers": WHOLE}),
    st.fixed_dictionaries({"placement": st.just("rank0")}),
)
ps_parts = st.builds(
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
    ps_parts,
    st.builds(
        gossip, graph=st.sampled_from(GRAPHS) | NAMES.map(lambda n: n + ".csv") | EDGES, mode=ROUND
    ),
    st.builds(
        localsgd,
        every=WHOLE,
        outer=maybe(st.sampled_from(["sgd", "nesterov(lr=0.7)", "adam(lr=1e-3, eps=0.1)"])),
        compress=COMPRESS,
    ),
)
unsplittable = st.builds(hogwild, momentum=FLAG) | st.builds(
    mapreduce, batch=st.sampled_from(["full", "mini"])
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
    schedule=st.sampled_from(SCHEDULES),
    microbatches=maybe(WHOLE),
    chunks=maybe(WHOLE),
    recompute=FLAG,
    cuts=maybe(st.lists(NAMES, min_size=1, max_size=3)),
)


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    if draw(st.integers(0, 5)) == 0:
        return as_strategy(draw(unsplittable))
    parts: list[Part] = [
        part for part in (draw(maybe(kind)) for kind in (splittable, tps, pps)) if part is not None
    ] or [ddp()]
    parts = draw(st.permutations(parts))
    strategy = as_strategy(parts[0])
    for part in parts[1:]:
        strategy = strategy + part
    return strategy


@given(strategies())
@settings(max_examples=500, deadline=None)
def test_parse_undoes_str(strategy: Strategy) -> None:
    again = parse(str(strategy))
    assert again == strategy and hash(again) == hash(strategy)
    assert str(again) == str(strategy)
    assert str(strategy).isprintable()


@given(strategies())
@settings(deadline=None)
def test_strategies_travel_between_processes(strategy: Strategy) -> None:
    assert pickle.loads(pickle.dumps(strategy)) == strategy == copy.deepcopy(strategy)


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
        ("ddp", 0, "workers=0 must be a whole number from 1"),
        ("ddp", True, "workers=True must be a whole number"),
        ("ddp", 2.0, "workers=2.0 must be a whole number"),
    ],
)
def test_workers_that_do_not_fit_are_refused(text: str, workers: int, sentence: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(text).layout(workers)
    assert sentence in str(caught.value)


def test_without_a_sync_part_more_than_one_replica_means_ddp() -> None:
    assert parse("tp(2)").sync is None
    assert parse("tp(2)").sync_for(1) == Single()
    assert parse("tp(2)").sync_for(2) == Ddp()
    assert parse("zero(2) + tp(2)").sync_for(2) == Zero(2)


@pytest.mark.parametrize(
    "text",
    ["single", "ddp", "zero(3)", "ps", "ps(servers=4)", "ps(staleness=0)", "mapreduce",
     "tp(2)", "ps + pp(2)", 'mapreduce(batch="mini")', 'gossip(graph="complete")',
     "localsgd(every=1)"],
)  # fmt: skip
def test_synchronous_strategies_equal_a_single_device(text: str) -> None:
    assert parse(text).is_synchronous


@pytest.mark.parametrize(
    "text",
    ["hogwild", "localsgd", "gossip", "gossip + tp(2)", "ps(quorum=0.9)", "ps(staleness=1)",
     'ps(mode="async")', 'gossip(graph="complete", mode="async")', 'ddp(compress="fp16")',
     'ps(compress="int8")', 'ddp(compress="topk(0.01)") + pp(2)', "localsgd(every=2)",
     'localsgd(every=1, outer="nesterov")', 'localsgd(every=1, compress="int8")'],
)  # fmt: skip
def test_the_other_strategies_do_not(text: str) -> None:
    assert not parse(text).is_synchronous


# ---- what is built: stated for a BUILT of its own, so that flipping entries breaks no test ------
@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "single": {},
        "ddp": {"algorithm": ("auto",), "bucket_mb": notation.EVERY_VALUE},
    }
    monkeypatch.setattr(notation, "BUILT", table)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("text", ["single", "ddp", "ddp(bucket_mb=4)", 'ddp(algorithm="auto")'])
def test_what_is_built_passes(text: str) -> None:
    require_built(parse(text))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "gossip",
            "gossip is not built yet: it is part of the notation, but this version "
            "has no runtime for it; ddp and single work",
        ),
        ("ddp + tp(2)", "tp is not built yet"),
        ('ddp(algorithm="tree")', 'ddp(algorithm="tree") is not built yet: algorithm'),
        ('ddp(compress="fp16")', 'ddp(compress="fp16") is not built yet: compress'),
    ],
)
def test_what_is_not_built_is_named(text: str, sentence: str) -> None:
    with pytest.raises(NotBuilt) as caught:
        require_built(parse(text))
    assert sentence in str(caught.value)


def test_the_built_table_names_parts_and_options_that_exist() -> None:
    for name, options in BUILT.items():
        assert set(options) <= {option.name for option in fields(PARTS[name])}


def test_the_notation_loads_neither_torch_nor_numpy_nor_networkx() -> None:
    """The command line reads strategies, and has to start quickly."""
    code = (
        "import sys, shoal.strategy; shoal.strategy.parse('gossip'); "
        "print({'torch', 'numpy', 'networkx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("ps", 1),
        ("ps(servers=3)", 3),
        ('ps(placement="rank0")', 0),
        ('ps(placement="workers", servers=2)', 0),
        ("ps(servers=2) + pp(2)", 2),
        ("ddp", 0),
        ("tp(2)", 0),
    ],
)
def test_processes_beside_the_workers(text: str, servers: int) -> None:
    assert parse(text).servers(4) == servers
