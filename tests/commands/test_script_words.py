"""Which words are the command's and which the script's: `shoal run train.py -n 2 --epochs 1`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from shoal.cli import build_app
from shoal.errors import BadInput
from tests import scripts
from tests.commands.terminal import shoal

SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument('--seed', type=int)
parser.add_argument("--worker", type=int)
parser.add_argument("-name")
print(parser.parse_args())
"""
SAID = "is taken as the option of shoal"


@pytest.fixture(autouse=True)
def script_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)


def split(line: str) -> tuple[str, str]:
    """The words of the command, and those of the script."""
    name, *words = line.split()
    group: Any = typer.main.get_command(build_app([name]))
    found: list[str] = group.commands[name]._split(words, f"shoal {name}")
    at = found.index("--")
    return " ".join(found[:at]), " ".join(found[at + 1 :])


@pytest.mark.parametrize(
    ("line", "ours", "theirs", "said"),
    [
        ("run train.py -n 2 -s ddp", "train.py -n 2 -s ddp", "", None),
        ("run train.py -n 2 --epochs 1", "train.py -n 2", "--epochs 1", None),
        ("run -n 2 train.py data --lr=-1 -v", "-n 2 train.py", "data --lr=-1 -v", None),
        ("run train.py --epochs 1 -n2 -sddp", "train.py -n2 -sddp", "--epochs 1", None),
        ("run train.py -name a --shift -1", "train.py", "-name a --shift -1", None),
        ("run train.py -- -n 3 -- --seed 1", "train.py", "-n 3 -- --seed 1", None),
        ("run train.py --worker 3", "train.py", "--worker 3", None),
        ("run train.py -n 2 --seed 3", "train.py -n 2 --seed 3", "", "--seed"),
        ("run train.py --lr 1 --device=cpu", "train.py --device=cpu", "--lr 1", "--device"),
        ("train gpt --size large -n 2", "gpt -n 2", "--size large", None),
        ("verify train.py --steps 3 --lr 1", "train.py --steps 3", "--lr 1", None),
        ("compare train.py -s ddp --lr 1 -s ps", "train.py -s ddp -s ps", "--lr 1", None),
        ("memory train.py --measure --lr 1", "train.py --measure", "--lr 1", None),
        ("plan train.py --batch-size 8 -n 4", "train.py -n 4", "--batch-size 8", None),
        ("eval runs/a train.py -n 2 --lr 1", "runs/a train.py -n 2", "--lr 1", None),
        ("submit --slurm train.py --lr 1 -o a", "--slurm train.py -o a", "--lr 1", None),
    ],
)
def test_words(
    line: str, ours: str, theirs: str, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert split(line) == (ours, theirs)
    stderr = capsys.readouterr().err
    assert (f"{said} {SAID}" in stderr and "behind --" in stderr) if said else stderr == ""


def test_a_typing_error_is_not_the_scripts() -> None:
    with pytest.raises(BadInput, match=r"did you mean --workers\? .* put it behind --"):
        split("run train.py --wrokers 2")


def test_a_run(tmp_path: Path) -> None:
    done = scripts.shoal("run", "train.py", "-n", "1", "--epochs", "1", "-name", "a", cwd=tmp_path)
    assert "epochs=1, seed=None, worker=None, name='a'" in done.stdout


def test_options_before_the_script_or_of_a_model_are_the_commands() -> None:
    before = shoal("run", "--epochs", "1", "train.py")
    assert before.exit_code == 2
    assert "options of the script stand behind it" in before.stderr
    assert shoal("plan", "gpt-3", "--epochs", "1").exit_code == 2
