"""The options that the examples share."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.commands.examples.digits import read_options
from shoal.commands.examples.options import resume
from tests.jobs import job_of


@pytest.mark.parametrize(
    "argv, complaint",
    [
        (["--epochs", "0"], "0 is below 1"),
        (["--lr", "-1"], "-1 is not a number above 0"),
        (["--clip-norm", "nan"], "nan is not a number above 0"),
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


def test_resume_without_a_checkpoint_says_so_and_starts_from_the_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume(job_of(), str(tmp_path / "nothing"))
    said = f"no checkpoint in {tmp_path / 'nothing'} yet: starting from the beginning\n"
    assert capsys.readouterr().out == said
