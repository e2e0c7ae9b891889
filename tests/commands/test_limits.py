"""Numbers, sizes and names that no command can use are refused in one sentence."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from shoal.calibration.measure import check_seconds
from shoal.cli import main
from shoal.commands import bench_hosts
from shoal.errors import BadInput
from shoal.launch.running import RunFacts, enter_run, find_run
from shoal.runtime.run_dir import new_run_dir


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_calibration_takes_more_than_no_time_and_at_most_a_day(seconds: float) -> None:
    with pytest.raises(BadInput, match="more than 0 and at most 86400 are expected"):
        check_seconds(seconds)


@pytest.mark.parametrize("ranks", ["1", "5", "-1", "x", "\u00b2", ",", "9" * 5000])
def test_numbers_of_hosts_are_those_of_the_lab(ranks: str) -> None:
    with pytest.raises(BadInput, match="a number of hosts from 2 to 4 is expected"):
        bench_hosts._counts(ranks, 4)


@pytest.mark.parametrize("size", ["0", "1", "99999TB", "1e300"])
def test_sizes_of_an_all_reduce_have_limits(size: str) -> None:
    with pytest.raises(BadInput, match="from 4 bytes to 10 GB are expected"):
        bench_hosts._size(size)


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
