"""Words of the field that are no names of strategies or collectives get a sentence."""

from __future__ import annotations

import pytest

from shoal.errors import BadInput, StrategyError
from shoal.schedules.collectives.kinds import KINDS, kind_named
from shoal.strategy.parser import _MEANT
from shoal.strategy.strategy import parse
from shoal.strategy.terms import TERMS


@pytest.mark.parametrize(
    ("word", "to_write"),
    [
        ("ring", 'ddp(algorithm="ring")'),
        ("ssgd", "ps"),
        ("asgd", 'ps(mode="async")'),
        ("ssp", "ps(staleness=4)"),
        ("bsp", "ddp"),
        ("fsdp", "zero(3)"),
        ("FSDP", "zero(3)"),
        ("fsdp(stage=3)", "zero(3)"),
        ("horovod", "ddp"),
        ("dp", "ddp"),
        ("dp + pp(2)", "ddp"),
        ("inter-op", "pp(2)"),
        ("diloco", 'localsgd(outer="nesterov")'),
    ],
)
def test_a_word_of_the_field_gets_what_to_write(word: str, to_write: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse(word)
    assert f"is written {to_write}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", _MEANT)
def test_what_is_proposed_parses_and_the_word_is_free(word: str) -> None:
    assert word not in TERMS
    for proposal in _MEANT[word][1].replace(" or ", ", ").split(", "):
        if proposal.split("(")[0] in TERMS and proposal.count("(") == proposal.count(")"):
            first = proposal.split(" ")[0] if "=" not in proposal else proposal
            assert parse(first)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("prefix_sum", "a prefix sum is scan"),
        ("prefix-sum", "a prefix sum is scan"),
        ("push", "group.send and group.recv"),
        ("pull", "group.send and group.recv"),
        ("bcast", "broadcast"),
        ("allreduce", "all_reduce"),
        ("exscan", "exclusive_scan"),
    ],
)
def test_a_collective_of_another_name_gets_ours(word: str, sentence: str) -> None:
    assert word not in KINDS
    with pytest.raises(BadInput) as caught:
        kind_named(word)
    assert sentence in str(caught.value)
