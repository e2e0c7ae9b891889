from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.worker.environment import Placement
from shoal.worker.rendezvous import open_rendezvous


def ranks(directory: Path, size: int = 2) -> list[Placement]:
    where = f"file://{directory}/shoal-0/mpi-ab"
    return [Placement("openmpi", rank, size, rank, size, where) for rank in range(size)]


def test_ranks_meet_at_one_file_and_the_last_one_out_removes_it(tmp_path: Path) -> None:
    zero, one = ranks(tmp_path)
    job = tmp_path / "shoal-0" / "mpi-ab"
    with open_rendezvous(zero) as mine:
        with open_rendezvous(one) as yours:
            assert mine == yours == f"file://{job}/store-0"
            (job / "store-0").touch()
        assert job.is_dir()
    assert not job.exists()
    assert job.parent.stat().st_mode & 0o777 == 0o700


def test_a_rank_that_is_ahead_does_not_meet_at_the_old_file(tmp_path: Path) -> None:
    zero, one = ranks(tmp_path)
    slow = open_rendezvous(one)
    first = slow.__enter__()
    with open_rendezvous(zero) as same:
        assert same == first
    with open_rendezvous(zero) as second:
        assert second != first
        slow.__exit__(None, None, None)
        with open_rendezvous(one) as also_second:
            assert also_second == second
    assert not (tmp_path / "shoal-0" / "mpi-ab").exists()


def test_what_a_crashed_job_left_is_not_used(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    job = tmp_path / "shoal-0" / "mpi-ab"
    job.parent.mkdir(mode=0o700)
    job.mkdir()
    (job / "in-0-0").write_text(str(dead.pid))
    (job / "store-0").write_text("old keys")
    zero, one = ranks(tmp_path)
    with open_rendezvous(one) as yours, open_rendezvous(zero) as mine:
        assert mine == yours and not (job / "store-0").exists()


@pytest.mark.parametrize("spoil", ["symlink", "file", "open to others"])
def test_a_directory_that_others_may_own_is_refused(tmp_path: Path, spoil: str) -> None:
    home = tmp_path / "shoal-0"
    if spoil == "symlink":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        home.symlink_to(tmp_path / "elsewhere")
    elif spoil == "file":
        home.touch()
    else:
        home.mkdir()
        home.chmod(0o755)
    with pytest.raises(BadInput, match="only you"), open_rendezvous(ranks(tmp_path)[0]):
        pass
