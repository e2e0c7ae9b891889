"""A user's own schedules: FILE.py:FUNCTION."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.schedules.collectives import Collective, Transfer
from shoal.schedules.collectives.catalog import build as build_collective
from shoal.schedules.pipelines import Action, ActionKind
from shoal.schedules.pipelines.catalog import build, schedule
from shoal.schedules.user import load_collective, load_pipeline
from tests.user_schedules import collectives, pipelines

__all__ = ["collectives", "pipelines"]  # fixtures


def test_a_pipeline_of_the_user_is_built_by_its_name(pipelines: Path) -> None:
    name = f"{pipelines}:zigzag"
    pipeline = build(name, 2, 2)
    assert pipeline.name == "zigzag"
    assert schedule(name).description.startswith("Two micro-batches forward, then both backward")
    assert [str(action) for action in pipeline.actions[1]] == ["F0", "F1", "B1", "B0"]
    whole = [Action(ActionKind.FORWARD, 0), Action(ActionKind.BACKWARD, 0)]
    assert load_pipeline(name)(1, 0, 1) == whole


@pytest.mark.parametrize(
    ("name", "chunks", "expected"),
    [("looped", None, 2), ("looped", 4, 4), ("thrice", None, 3), ("thrice", 1, 1)],
)
def test_a_function_of_four_numbers_takes_chunks(
    pipelines: Path, name: str, chunks: int | None, expected: int
) -> None:
    assert build(f"{pipelines}:{name}", 2, 2, chunks).chunks == expected
    with pytest.raises(BadInput, match="zigzag has one chunk a stage, not 2"):
        build(f"{pipelines}:zigzag", 2, 2, 2)


def test_a_collective_of_the_user_is_built_by_its_name(collectives: Path) -> None:
    name = f"{collectives}:broadcast"
    hops = [[Transfer(0, 1, 0, False)], [Transfer(1, 2, 0, False)]]
    assert [list(transfers) for transfers in build_collective("broadcast", name, 3).rounds] == hops
    turned = build_collective("broadcast", name, 3, root=2)
    assert turned.root == 2 and next(iter(turned.rounds[0])) == Transfer(2, 0, 0, False)
    assert isinstance(load_collective(name)(3), Collective)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("broadcast", "broadcast is a schedule for broadcast, not for all_reduce"),
        ("for_two", "for_two made a schedule for 2 ranks, not for 3"),
        ("nothing", "must return a Collective, and returned None for 3 ranks"),
    ],
)
def test_a_wrong_collective_is_refused(collectives: Path, name: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        build_collective("all_reduce", f"{collectives}:{name}", 3)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing", "nothing must return a list of Action, and returned None"),
        ("words", "words must return a list of Action, and a str is in it"),
        ("fails", r"fails raised ValueError: no idea \(line \d+\)"),
        ("Pair", r"Pair raised TypeError: .*takes 3 positional arguments"),
        ("number", "pipelines.py has no function number"),
    ],
)
def test_a_wrong_pipeline_is_refused(pipelines: Path, name: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        build(f"{pipelines}:{name}", 2, 2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1\nx +\n", r"broken.py cannot be loaded: SyntaxError: invalid syntax \(line 2\)"),
        ("\n\nraise ValueError('no')\n", r"cannot be loaded: ValueError: no \(line 3\)"),
        (None, "there is no Python file .*broken.py"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused_with_its_line(
    tmp_path: Path, text: str | None, sentence: str
) -> None:
    file = tmp_path / "broken.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BadInput, match=sentence):
        load_pipeline(f"{file}:f")


def test_the_catalog_of_pipelines_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, shoal.schedules.pipelines.catalog\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
