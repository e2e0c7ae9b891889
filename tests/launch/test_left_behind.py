"""What a killed launcher or session leaves: no process, and no folder after the next start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.runtime import run_dir as directories
from shoal.runtime.files import remove_locked
from shoal.runtime.run_dir import RunDir, new_run_dir, new_server_dir
from tests.launch.helpers import HOLD, ROOT, Rope

HOLD_DIRECTORY = """
from shoal.runtime.run_dir import new_run_dir
from shoal.runtime.files import scratch_folder
with new_run_dir() as run_dir, scratch_folder("verify") as scratch:
    print(run_dir.path, scratch, flush=True)
    input()
"""


def test_notebook_workers_die_with_the_session(rope: Rope) -> None:
    session = f"""
import os, time
from shoal.launch.here.local import LaunchSpec, launch
from shoal.runtime.config import RunConfig
def body(config):
    {HOLD.strip()}
    time.sleep(60)
launch(LaunchSpec((), 2, RunConfig.from_environment(), body=body))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ROPE": str(rope.path)}
    env["TMPDIR"] = str(rope.path.parent)
    with subprocess.Popen([sys.executable, "-c", session], env=env) as process:
        rope.wait_held(2)
        process.kill()
        rope.wait_released()


def test_the_next_start_removes_the_folder_of_a_killed_launcher(own_folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_DIRECTORY],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    path, scratch = map(Path, process.stdout.readline().split())
    with new_run_dir():
        assert RunDir(path).secret.exists() and scratch.is_dir()  # its launcher runs
    process.kill()
    process.communicate()
    assert RunDir(path).secret.exists() and scratch.is_dir()
    with new_run_dir() as own, new_run_dir() as other:
        assert {own.path, other.path} == set(own_folder.iterdir())
    servers = new_server_dir()
    assert [servers.path] == list(own_folder.iterdir())
    remove_locked(servers.path)
    assert list(own_folder.iterdir()) == []


def test_a_full_temporary_folder_is_one_sentence(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(directories.RunDir, "write_secret", full)
        with pytest.raises(BadInput, match="No space left on device; make room there, or set"):
            new_run_dir().__enter__()
    monkeypatch.setattr(directories.tempfile, "mkdtemp", full)
    with pytest.raises(BadInput, match=r"cannot write the files of the run to .*TMPDIR"):
        new_run_dir().__enter__()
    assert list(own_folder.iterdir()) == []
