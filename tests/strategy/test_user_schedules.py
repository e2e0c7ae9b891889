"""Strategies that name a user's schedule: in the notation, and checked before workers start."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.schedules.pipelines.catalog import build
from shoal.schedules.user import is_user_function
from shoal.schedules.user_proof import digest, proven_collective
from shoal.strategy.strategy import parse
from tests.user_schedules import broken, collectives, pipelines

__all__ = ["broken", "collectives", "pipelines"]  # fixtures


def test_a_file_and_a_function_are_no_name_of_a_catalog() -> None:
    assert is_user_function("mine.py:zigzag") and is_user_function("/a b/my:own.py:f_2")
    for name in ("ring", "1f1b", "mine.py", "mine:zigzag", "mine.py:", "mine.py:a.b", ":f", ".py"):
        assert not is_user_function(name)


def test_equal_schedules_have_equal_digests(pipelines: Path, collectives: Path) -> None:
    zigzag = digest(build(f"{pipelines}:zigzag", 2, 4))
    assert zigzag == digest(build(f"{pipelines}:zigzag", 2, 4))
    assert zigzag != digest(build(f"{pipelines}:zigzag", 2, 5))
    name = f"{collectives}:two_hops"
    hops = [digest(proven_collective(name, "all_reduce", ranks)) for ranks in (3, 3, 4)]
    assert hops[0] == hops[1] != hops[2]


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
