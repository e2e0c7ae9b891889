"""A user's own schedules: FILE.py:FUNCTION."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import BadInput, CheckFailed
from shoal.schedules.collectives import catalog as collectives
from shoal.schedules.collectives.collective import Collective, Transfer
from shoal.schedules.pipelines import catalog as pipelines
from shoal.schedules.pipelines.actions import Action, ActionKind
from shoal.schedules.user import load_collective, load_pipeline

MINE = """
from shoal.schedules.collectives.collective import Collective, Transfer
from shoal.schedules.pipelines.actions import Action, ActionKind

F, B = ActionKind.FORWARD, ActionKind.BACKWARD

def zigzag(stages, stage, microbatches):
    '''One micro-batch after the other.'''
    return [Action(kind, m) for m in range(microbatches) for kind in (F, B)]

def loops(stages, stage, microbatches, chunks):
    order = [Action(F, m, c) for m in range(microbatches) for c in range(chunks)]
    return order + [Action(B, a.microbatch, a.chunk) for a in reversed(order)]

def loops_thrice(stages, stage, microbatches, chunks=3):
    return loops(stages, stage, microbatches, chunks)

def forgetful(stages, stage, microbatches):
    return [Action(F, m) for m in range(microbatches)]

def chain(ranks):
    return Collective("chain", ranks, 1, [[Transfer(r, r + 1, 0, False)] for r in range(ranks - 1)],
                      kind="broadcast")

def two(ranks):
    return Collective("two", 2, 1, [[Transfer(0, 1, 0, True), Transfer(1, 0, 0, True)]])

def none(*sizes):
    return None

def text(*sizes):
    return ["F0"]

def fails(*sizes):
    return 1 / 0

number = 7
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def test_a_pipeline_of_the_user_is_built_by_its_name(mine: Path) -> None:
    pipeline = pipelines.build(f"{mine}:zigzag", 2, 2)
    assert pipeline.name == "zigzag"
    assert pipelines.schedule(f"{mine}:zigzag").description == "One micro-batch after the other."
    assert [str(action) for action in pipeline.actions[1]] == ["F0", "B0", "F1", "B1"]
    assert load_pipeline(f"{mine}:zigzag")(1, 0, 1) == [
        Action(ActionKind.FORWARD, 0),
        Action(ActionKind.BACKWARD, 0),
    ]


@pytest.mark.parametrize(
    ("name", "chunks", "expected"),
    [("loops", None, 2), ("loops", 4, 4), ("loops_thrice", None, 3), ("loops_thrice", 1, 1)],
)
def test_a_function_of_four_numbers_takes_chunks(
    mine: Path, name: str, chunks: int | None, expected: int
) -> None:
    assert pipelines.build(f"{mine}:{name}", 2, 2, chunks).chunks == expected


def test_a_function_of_three_numbers_takes_no_chunks(mine: Path) -> None:
    with pytest.raises(BadInput, match="zigzag has one chunk a stage, not 2"):
        pipelines.build(f"{mine}:zigzag", 2, 2, 2)


def test_a_pipeline_of_the_user_is_proven_when_it_is_built(mine: Path) -> None:
    with pytest.raises(CheckFailed, match="stage 0 never does B0"):
        pipelines.build(f"{mine}:forgetful", 2, 2)


def test_a_collective_of_the_user_is_built_by_its_name(mine: Path) -> None:
    made = collectives.build("broadcast", f"{mine}:chain", 3)
    assert [list(transfers) for transfers in made.rounds] == [
        [Transfer(0, 1, 0, False)],
        [Transfer(1, 2, 0, False)],
    ]
    turned = collectives.build("broadcast", f"{mine}:chain", 3, root=2)
    assert turned.root == 2 and next(iter(turned.rounds[0])) == Transfer(2, 0, 0, False)
    assert isinstance(load_collective(f"{mine}:chain")(3), Collective)


@pytest.mark.parametrize(
    ("kind", "name", "ranks", "sentence"),
    [
        ("all_reduce", "chain", 3, "chain is a schedule for broadcast, not for all_reduce"),
        ("all_reduce", "two", 3, "two made a schedule for 2 ranks, not for 3"),
        ("all_reduce", "none", 3, "must return a Collective, and returned None for 3 ranks"),
        ("all_reduce", "text", 3, "must return a Collective, and returned a list for 3 ranks"),
        ("all_reduce", "fails", 3, r"fails raised ZeroDivisionError: division by zero \(line 35\)"),
        ("all_reduce", "number", 3, "mine.py has no function number"),
        ("all_reduce", "nothing", 3, "mine.py has no function nothing"),
    ],
)
def test_a_wrong_collective_is_refused(
    mine: Path, kind: str, name: str, ranks: int, sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence):
        collectives.build(kind, f"{mine}:{name}", ranks)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("none", "none must return a list of Action, and returned None"),
        ("text", "text must return a list of Action, and a str is in it"),
        ("fails", r"fails raised ZeroDivisionError: division by zero \(line 35\)"),
        ("chain", r"chain raised TypeError: chain\(\) takes 1 positional argument"),
        ("nothing", "mine.py has no function nothing"),
    ],
)
def test_a_wrong_pipeline_is_refused(mine: Path, name: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        pipelines.build(f"{mine}:{name}", 2, 2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1\nx +\n", r"broken.py cannot be loaded: SyntaxError: invalid syntax \(line 2\)"),
        ("import no_such_thing\n", r"ModuleNotFoundError: No module named .* \(line 1\)"),
        ("\n\nraise ValueError('no')\n", r"cannot be loaded: ValueError: no \(line 3\)"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused_with_its_line(
    tmp_path: Path, text: str, sentence: str
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(BadInput, match=sentence):
        load_pipeline(f"{file}:f")


@pytest.mark.parametrize("path", ["nowhere.py", "", "/", "nowhere.txt"])
def test_a_file_that_does_not_exist_is_refused(path: str) -> None:
    with pytest.raises(BadInput, match=f"there is no Python file {path}"):
        load_collective(f"{path}:f")


def test_the_catalog_of_pipelines_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, shoal.schedules.pipelines.catalog\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
