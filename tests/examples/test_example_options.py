"""The options that the examples share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.examples.digits import read_options
from shoal.examples.options import resume


class PrintingJob:
    def __init__(self) -> None:
        self.printed: list[str] = []

    def print(self, text: str) -> None:
        self.printed.append(text)


@pytest.mark.parametrize(
    "argv, complaint",
    [
        (["--epochs", "0"], "0 is below 1"),
        (["--epochs", "x"], "invalid count value: 'x'"),
        (["--lr", "-1"], "-1 is not a number above 0"),
        (["--clip-norm", "nan"], "nan is not a number above 0"),
        (["--precision", "fp8"], "invalid choice: 'fp8'"),
        (["--resume"], "--resume and --save-every need --out"),
        (["--save-every", "5"], "--resume and --save-every need --out"),
    ],
)
def test_a_bad_option_is_one_sentence_and_exit_status_2(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_options(argv)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_what_a_checkpoint_says_about_itself_is_json() -> None:
    about = read_options(["--out", "somewhere"]).about("digits")
    assert json.loads(json.dumps(about)) == about
    assert about["example"] == "digits" and about["options"]["batch_size"] == 64


def test_resume_without_a_checkpoint_says_so_and_starts_from_the_beginning(tmp_path: Path) -> None:
    job: Any = PrintingJob()
    resume(job, str(tmp_path / "nothing"))
    assert job.printed == [
        f"no checkpoint in {tmp_path / 'nothing'} yet: starting from the beginning"
    ]
