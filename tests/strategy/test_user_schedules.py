"""Strategies that name a user's schedule: in the notation, and checked before workers start."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.schedules.pipelines.catalog import build
from shoal.schedules.pipelines.proof import prove
from shoal.schedules.user import is_user_function
from shoal.schedules.user_proof import digest, proven_collective, proven_pipeline
from shoal.strategy.strategy import parse
from tests.user_schedules import broken, collectives, pipelines

__all__ = ["broken", "collectives", "pipelines"]  # fixtures


def test_a_file_and_a_function_are_no_name_of_a_catalog() -> None:
    assert is_user_function("mine.py:zigzag") and is_user_function("/a b/my:own.py:f_2")
    for name in ("ring", "1f1b", "mine.py", "mine:zigzag", "mine.py:", "mine.py:a.b", ":f", ".py"):
        assert not is_user_function(name)


def test_zigzag_is_two_forwards_and_two_backwards(pipelines: Path) -> None:
    pipeline = build(f"{pipelines}:zigzag", 2, 3)
    assert [str(action) for action in pipeline.actions[0]] == ["F0", "F1", "B1", "B0", "F2", "B2"]
    assert prove(pipeline).peak_live == (2, 2)


def test_equal_schedules_have_equal_digests(pipelines: Path, collectives: Path) -> None:
    zigzag = digest(build(f"{pipelines}:zigzag", 2, 4))
    assert zigzag == digest(build(f"{pipelines}:zigzag", 2, 4))
    assert zigzag != digest(build(f"{pipelines}:zigzag", 2, 5))
    name = f"{collectives}:two_hops"
    hops = [digest(proven_collective(name, "all_reduce", ranks)) for ranks in (3, 3, 4)]
    assert hops[0] == hops[1] != hops[2]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("forgetful", "cannot be used: forgetful of 2 stages and 4 micro-batches is wrong: "
         "stage 0 never does B0"),
        ("stuck", "cannot be used: stuck of 2 stages and 4 micro-batches hangs: "),
        ("words", "must return a list of Action, and a str is in it"),
        ("fails", "raised ValueError: no idea"),
        ("nothing", "has no function nothing"),
    ],
)  # fmt: skip
def test_a_wrong_pipeline_is_one_sentence(pipelines: Path, function: str, sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        proven_pipeline(f"{pipelines}:{function}", 2, 4)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("half", "cannot be used: all_reduce half over 3 ranks is wrong: at the end rank 0 lacks "
         "the contribution of ranks 1, 2 in chunk 0"),
        ("for_two", "made a schedule for 2 ranks, not for 3"),
        ("broadcast", "is a schedule for broadcast, not for all_reduce"),
        ("nothing", "must return a Collective, and returned None"),
        ("missing", "has no function missing"),
    ],
)  # fmt: skip
def test_a_wrong_collective_is_one_sentence(
    collectives: Path, function: str, sentence: str
) -> None:
    with pytest.raises(BadInput) as caught:
        proven_collective(f"{collectives}:{function}", "all_reduce", 3)
    assert sentence in str(caught.value)


def test_a_relative_path_stays_that_of_the_first_use(
    pipelines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipelines.rename(tmp_path / "relative_to_launch.py")
    monkeypatch.chdir(tmp_path)
    first = build("relative_to_launch.py:zigzag", 2, 4)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert build("relative_to_launch.py:zigzag", 2, 4) == first


@pytest.mark.parametrize(
    "text",
    [
        'pp(2, schedule="mine.py:zigzag")',
        'ddp(algorithm="my folder/mine.py:two_trees") + pp(2, schedule="a\\"b.py:f", chunks=2)',
    ],
)
def test_the_notation_keeps_a_user_schedule(text: str) -> None:
    assert str(parse(text)) == text and parse(str(parse(text))) == parse(text)


def test_parsing_does_not_execute_the_file(broken: Path) -> None:
    strategy = parse(f'ddp(algorithm="{broken}:f") + pp(2, schedule="{broken}:f")')
    with pytest.raises(BadInput, match="cannot be loaded: ModuleNotFoundError"):
        strategy.layout(4)


def test_a_strategy_checks_its_schedules_when_the_workers_are_known(
    pipelines: Path, collectives: Path
) -> None:
    parse(f'pp(2, schedule="{pipelines}:zigzag", microbatches=4)').layout(2)
    with pytest.raises(BadInput, match="never does B0"):
        parse(f'pp(2, schedule="{pipelines}:forgetful", microbatches=4)').layout(2)
    with pytest.raises(BadInput, match="no function missing"):
        parse(f'pp(2, schedule="{pipelines}:missing")').layout(2)
    parse(f'ddp(algorithm="{collectives}:two_hops")').layout(3)
    with pytest.raises(BadInput, match="lacks the contribution of ranks 1, 2"):
        parse(f'ddp(algorithm="{collectives}:half")').layout(3)
    parse(f'ddp(algorithm="{collectives}:half")').layout(1)  # nothing to reduce
