"""The files of a run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.runtime.files import remove_locked, write_atomically
from shoal.runtime.run_dir import RunDir, new_run_dir, new_server_dir
from shoal.runtime.secret import SECRET_BYTES, new_secret


def test_a_new_directory_is_private_has_a_secret_and_is_removed() -> None:
    with new_run_dir() as run_dir:
        assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
        assert stat.S_IMODE(run_dir.secret.stat().st_mode) == 0o600
        secret = run_dir.read_secret()
        assert secret is not None and len(secret) == SECRET_BYTES
    assert not run_dir.path.exists()


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.write_secret(new_secret())
    run_dir.secret.chmod(0o640)
    with pytest.raises(BadInput, match="other users can read it: chmod 600"):
        run_dir.read_secret()


def test_finished_workers_in_the_order_in_which_they_finished(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for moment_ns, rank in enumerate((2, 0, 1), start=1):
        run_dir.mark_finished(rank)
        os.utime(run_dir.finished(rank), ns=(moment_ns, moment_ns))
    assert run_dir.finished_ranks() == [2, 0, 1]


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "report-0.json"
    write_atomically(file, "old")
    write_atomically(file, memoryview(b"new"))
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_a_report_on_a_full_disk_does_not_fail_the_run(tmp_path: Path) -> None:
    (gone := RunDir(tmp_path / "missing")).write(gone.report(0), {"steps": 1})
    RunDir(tmp_path / "missing").mark_finished(0)


def test_the_directory_of_servers_is_short_enough_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    run_dir = new_server_dir()
    try:
        assert len(run_dir.socket(999).removeprefix("unix:")) <= 100
        assert list(deep.iterdir()) == []
    finally:
        remove_locked(run_dir.path)


def test_what_others_wait_for_and_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "gone")
    with pytest.raises(BadInput, match=r"cannot write the files of the run to .*gone: No such"):
        run_dir.note_exit(0, 0)
