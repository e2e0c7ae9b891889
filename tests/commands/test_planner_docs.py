"""The sample output of docs/planner.md is what its commands print, up to the figures."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from shoal.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"
SAMPLES = re.findall(r"```console\n\$ (.*)\n([\s\S]*?)```", PAGE.read_text(encoding="utf-8"))


def shape(text: str) -> list[tuple[int, str]]:
    """Of each line that is not empty: how far its words are to the right, and the first of them."""
    lines = [line for line in text.splitlines() if line.strip()]
    return [(_indent(line), re.sub(r"[\d.%]+", "0", line.split()[0])) for line in lines]


def _indent(line: str) -> int:
    """0, or 1 for any: figures are right-justified."""
    return min(1, len(line) - len(line.lstrip()))


@pytest.mark.parametrize(("command", "printed"), SAMPLES, ids=[one for one, _ in SAMPLES])
def test_a_sample_has_the_shape_of_the_output(
    capsys: pytest.CaptureFixture[str], command: str, printed: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(shlex.split(command)[1:])
    assert not stopped.value.code
    assert shape(capsys.readouterr().out) == shape(printed)


def test_there_are_samples() -> None:
    assert len(SAMPLES) == 3
