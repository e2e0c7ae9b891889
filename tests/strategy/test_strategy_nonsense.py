"""A strategy that makes no sense is refused by name, in a sentence."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import BadInput, StrategyError
from shoal.schedules.collectives.kinds import kind_named
from shoal.strategy.strategy import _MEANT, MAX_TEXT, Strategy, as_strategy, parse
from shoal.strategy.sync_terms import Ddp
from shoal.strategy.terms import TERMS, ddp, pp, zero

NONSENSE = {
    "": "the strategy is empty",
    "dpp": "unknown strategy 'dpp'; did you mean 'ddp'?",
    "local_sgd": "did you mean 'localsgd'?",
    "xyzzy": "unknown strategy 'xyzzy'; the strategies are single, ddp, zero",
    "ddp(bucketmb=4)": "ddp has no option 'bucketmb'; did you mean 'bucket_mb'?",
    "ddp(x=4)": "ddp has no option 'x'; the options are algorithm, bucket_mb, compress",
    "single(x=4)": "single has no option 'x'; it has no options",
    "ddp(**{})": "ddp has no option '**'",
    "ddp(4)": "ddp takes no value without a name",
    "tp(*[4])": "tp: size=*[4] is not a literal value",
    "zero(1, 2)": "zero takes only stage without a name",
    "zero(1, stage=2)": "zero: stage is given twice",
    "ddp(bucket_mb=1, bucket_mb=2)": "ddp: bucket_mb is given twice",
    "tp": "tp needs a size, as in tp(2)",
    "pp(schedule='gpipe')": "pp needs a size, as in pp(2)",
    "tp(0)": "tp: size=0 is not allowed; size must be a whole number from 1",
    "tp(True)": "tp: size=True is not allowed",
    "tp(10**9)": "not a literal value",
    "tp(1000000001)": "from 1 to 1000000000",
    "tp(0x" + "f" * 9000 + ")": "tp: size=(int) is not allowed",
    "tp(" + "9" * 9000 + ")": "cannot read",
    "zero(4)": "zero: stage=4 is not allowed; stage must be one of 1, 2, 3",
    "ddp(bucket_mb=0)": "ddp: bucket_mb=0 is not allowed; bucket_mb must be a number above 0",
    "ddp(bucket_mb=1e999)": "bucket_mb=inf is not allowed",
    "ddp(bucket_mb='4')": 'bucket_mb="4" is not allowed',
    "ddp(algorithm=3)": "algorithm=3 is not allowed; algorithm must be a name",
    "ddp(compress='zip')": 'compress="zip" is not allowed; compress must be None or "fp16"',
    "ddp(compress='topk(0)')": "compress must be",
    "ddp(compress='powersgd(rank=0)')": "compress must be",
    "ddp(compress='fp16\\n')": "compress must be",
    "ps(mode='later')": 'mode="later" is not allowed; mode must be one of "sync", "async"',
    "ps(mode=sync)": "mode=sync is not a literal value",
    "ps(mode=__import__('os').getcwd())": "is not a literal value",
    "ps(mode=[{}])": "mode=[{}] is not allowed",
    "ps(mode={[]: 1})": "is not a literal value",
    "ps(quorum=0)": "quorum must be None or a number above 0 and at most 1",
    "ps(quorum=1.1)": "quorum=1.1 is not allowed",
    "ps(quorum=3.0)": "or a whole number of workers from 2 on",
    "ps(staleness=-1)": "staleness=-1 is not allowed",
    "ps(mode='async', quorum=0.5)": 'ps: quorum and mode="async" exclude each other',
    "ps(mode='async', staleness=1)": 'ps: staleness and mode="async" exclude each other',
    "ps(quorum=0.5, staleness=0)": "ps: quorum and staleness exclude each other",
    "ps(late='fold')": 'ps: late="fold" needs quorum',
    "ps(update='worker', quorum=0.5)": 'ps: update="worker" and quorum exclude each other',
    "ps(servers=2, placement='rank0')": "rank 0 has room for one server",
    "ps(replicas=0)": "replicas=0",
    "ps(replicas=2, placement='rank0')": "each is a process of its own",
    "ps(replicas=2, consistency='weak')": 'one of "strong", "eventual"',
    "ps(consistency='eventual')": "needs replicas, as in replicas=3",
    "gossip(graph='blob')": "graph must be one of ring, torus",
    "gossip(graph='a\\nb.txt')": r'graph="a\nb.txt" is not allowed',
    "gossip(graph='\\ud800.txt')": r'graph="\ud800.txt" is not allowed',
    "hogwild(momentum=1)": "momentum=1 is not allowed; momentum must be True or False",
    "mapreduce(batch='half')": 'batch must be one of "full", "mini"',
    "localsgd(every=0)": "every=0 is not allowed",
    "localsgd(outer='nesterov(')": "outer must be None or an optimizer such as",
    "tp(2, plan={})": "plan must be None or a dict",
    "tp(2, plan={'a': 'diagonal'})": 'plan={"a": "diagonal"} is not allowed',
    "tp(2, plan={'a': 'row', 'a': 'column'})": "tp: plan names a key twice",
    "pp(2, schedule='1b1f')": 'schedule must be one of "inter-op", "gpipe", "1f1b"',
    "pp(2, cuts='abc')": "cuts must be None or a list of module names",
    "pp(2, cuts=[1])": "cuts=[1] is not allowed",
    "ddp + ps": "ddp + ps: a strategy has at most one way to synchronize replicas",
    "tp(2) + tp(4)": "tp(2) + tp(4): a strategy has at most one tp",
    "pp(2) + ddp + pp(2)": "pp(2) + pp(2): a strategy has at most one pp",
    "hogwild + pp(2)": "hogwild + pp makes no sense: each worker runs the whole model",
    "mapreduce + tp(2)": "mapreduce + tp makes no sense: a map task is the whole model",
    "ddp - tp(2)": "cannot read 'ddp - tp(2)' as a term of a strategy",
    "+ddp": "cannot read '+ddp' as a term of a strategy",
    "shoal.ddp()": "cannot read 'shoal.ddp()' as a term of a strategy",
    "'ddp'": "as a term of a strategy",
    "(x := ddp)": "as a term of a strategy",
    "f'{ddp}'": "as a term of a strategy",
    "ddp +": 'cannot read "ddp +" as a strategy: there is no term behind the last +',
    "ddp(": "'(' was never closed",
    "import os": "cannot read",
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
    with pytest.raises(StrategyError) as caught:
        parse(text)
    message = str(caught.value)
    assert NONSENSE.get(text, "") in message
    assert len(message) < 400 and "\n" not in message
    message.encode()  # can be printed anywhere


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
def test_only_text_terms_and_strategies_name_a_strategy(value: object) -> None:
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
    with pytest.raises(StrategyError, match="made of terms"):
        Strategy("ddp")  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="has a term"):
        Strategy()
    with pytest.raises(TypeError):
        ddp() + "tp(2)"  # type: ignore[operator]


def test_a_strategy_too_long_to_be_read_back_is_refused() -> None:
    with pytest.raises(StrategyError, match="at most 10000 characters"):
        as_strategy(pp(2, cuts=["layer"] * 2000))


WRITTEN = {  # words of the field that are no names of strategies
    **{"ring": 'ddp(algorithm="ring")', "ssgd": "ps", "asgd": 'ps(mode="async")', "bsp": "ddp"},
    **{
        "ssp": "ps(staleness=4)",
        "horovod": "ddp",
        "DataParallel": "ddp",
        "dp": "ddp",
        "dp + pp(2)": "ddp",
    },
    **dict.fromkeys(("fsdp", "FSDP", "fsdp(stage=3)"), "zero(3)"),
    **{"inter-op": "pp(2)", "diloco": 'localsgd(outer="nesterov")'},
}


@pytest.mark.parametrize("word", WRITTEN)
def test_a_word_of_the_field_gets_what_to_write(word: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(word)
    assert f"is written {WRITTEN[word]}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", _MEANT)
def test_what_is_proposed_parses_and_the_word_is_free(word: str) -> None:
    assert word not in TERMS
    for proposal in _MEANT[word][1].replace(" or ", ", ").split(", "):
        if proposal.split("(")[0] in TERMS and proposal.count("(") == proposal.count(")"):
            first = proposal.split(" ")[0] if "=" not in proposal else proposal
            assert parse(first)


OURS = {
    **dict.fromkeys(("prefix_sum", "prefix-sum"), "a prefix sum is scan"),
    **dict.fromkeys(("push", "pull"), "group.send and group.recv"),
    **{"bcast": "broadcast", "allreduce": "all_reduce", "exscan": "exclusive_scan"},
}


@pytest.mark.parametrize("word", OURS)
def test_a_collective_of_another_name_gets_ours(word: str) -> None:
    with pytest.raises(BadInput) as caught:
        kind_named(word)
    assert OURS[word] in str(caught.value)
