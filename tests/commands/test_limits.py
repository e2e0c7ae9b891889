"""Numbers, sizes and names that no command can use are refused in one sentence."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from shoal.calibration.measure import check_seconds
from shoal.cli import main
from shoal.errors import BadInput
from shoal.launch.running import RunFacts, enter_run, find_run
from shoal.runtime.run_dir import new_run_dir


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_calibration_takes_more_than_no_time_and_at_most_a_day(seconds: float) -> None:
    with pytest.raises(BadInput, match="more than 0 and at most 86400 are expected"):
        check_seconds(seconds)


def test_a_folder_with_a_name_that_is_too_long_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = "x" * 300
    with pytest.raises(SystemExit) as ended:
        main(["keys", "tls", folder, "--host", "a"])
    sentence = f"shoal: cannot make the folder {folder}: File name too long\n"
    assert (ended.value.code, capsys.readouterr().err) == (2, sentence)


def test_an_empty_name_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with new_run_dir() as run_dir:
        name = enter_run(run_dir, RunFacts("ps", 1, 0, ("python", "train.py"), ("here",)))
        assert find_run(name[:2]).run_dir == run_dir
        with pytest.raises(BadInput, match="there is no run ''"):
            find_run("")
