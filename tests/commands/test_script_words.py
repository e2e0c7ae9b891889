"""Which words are the command's and which the script's: `shoal run -n 2 train.py --epochs 1`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from shoal.commands.cli import build_app
from tests import scripts
from tests.commands.terminal import shoal

SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--workers", type=int)
parser.add_argument("--resume", action="store_true")
print(parser.parse_args())
"""


@pytest.fixture(autouse=True)
def script_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)


def parsed(line: str) -> dict[str, Any]:
    """The parameters of a command."""
    name, *words = line.split()
    group: Any = typer.main.get_command(build_app([name]))
    found: dict[str, Any] = group.commands[name].make_context(f"shoal {name}", words).params
    return found


OWN = "--workers 4 --seed 7 -n 2 -s ddp --device=cpu --checkpoint=c --timeout 3 --json --help"
COMMANDS = ("run", "compare", "memory", "plan", "predict", "submit", "verify", "scale")
LINES = [
    *(f"{name} -n 3 train.py" for name in (*COMMANDS, "rehearse")),
    *("train -n 3 digits", "eval -n 3 saved train.py", "explain -n 3 pp(2) train.py"),
]


@pytest.mark.parametrize("line", LINES)
def test_what_stands_behind_the_script_goes_to_it_unchanged(line: str) -> None:
    for sign in ("", "-- "):  # one right behind the script is left out
        found = parsed(f"{line} {sign}{OWN} -- x")
        assert str(found.get("workers", found.get("numbers"))) == "3"
        assert list(found["args"]) == f"{OWN} -- x".split()
    assert not parsed(line)["args"]


def test_options_stand_anywhere_where_there_is_no_script() -> None:
    assert parsed("plan gpt-3 -n 8")["workers"] == 8
    assert parsed("compare -s ddp --steps 3")["steps"] == 3
    assert parsed("eval saved -n 2")["workers"] == 2
    assert parsed("explain pp(2) -n 2")["workers"] == 2
    before = shoal("run", "--epochs", "1", "train.py")
    assert before.exit_code == 2
    assert "options of the script stand behind it" in before.stderr


def test_a_script_gets_the_options_that_are_named_as_those_of_shoal(tmp_path: Path) -> None:
    words = ("--workers", "4", "--seed", "7", "--resume")
    done = scripts.shoal("run", "-n", "1", "-s", "single", "train.py", *words, cwd=tmp_path)
    assert "Namespace(seed=7, workers=4, resume=True)" in done.stdout


@pytest.mark.parametrize("command", ["run", "memory"])
def test_where_a_script_refuses_an_option_of_shoal_a_line_says_where_it_belongs(
    tmp_path: Path, command: str
) -> None:
    done = scripts.shoal(command, "train.py", "-n", "2", "--seed", "1", "-sddp", cwd=tmp_path)
    assert done.returncode == 2
    where = f"options of shoal {command} stand before the script"
    assert f"-n, --seed, -sddp went to the script, being behind it: {where}" in done.stderr
    refused = scripts.shoal(command, "train.py", "--other", cwd=tmp_path)
    assert refused.returncode == 2 and "stand before" not in refused.stderr


def test_a_script_that_reads_no_arguments_and_gets_options_of_shoal_is_told_at_the_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('it runs')\nsys.exit(3)\n")
    done = scripts.shoal("run", "train.py", "-n", "2", "--seed=1", cwd=tmp_path)
    words = "-n, --seed=1 went to the script, being behind it: options of shoal run stand before"
    assert done.stderr.count(words) == 1
    assert done.stderr.index(words) < done.stderr.index("worker 0 failed")
    silent = scripts.shoal("run", "train.py", "-q", "2", cwd=tmp_path)
    assert "stand before" not in silent.stderr


def test_usage_that_a_script_prints_by_itself_names_the_options_of_shoal(tmp_path: Path) -> None:
    usage = "import sys\nif len(sys.argv) > 1: sys.exit('Usage: train.py')\n"
    (tmp_path / "train.py").write_text(usage)
    done = scripts.shoal("run", "train.py", "-n", "2", cwd=tmp_path)
    assert "-n went to the script, being behind it" in done.stderr
