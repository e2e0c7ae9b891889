from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import shoal.transport.shm
from shoal.transport.shm import segment

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
sys.modules["shoal.transport.shm._shm"] = None  # as if it had not been built
import torch, shoal

def train(job):
    data = torch.ones(3)
    job.group.all_reduce(data).wait()
    job.print(type(job.group.executor).__name__, data.tolist())

shoal.run(train)
"""


def test_without_a_compiler_the_build_succeeds_and_leaves_the_native_part_out(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "-b", str(tmp_path), "-t", str(tmp_path / "t")],
        cwd=ROOT,
        env={**os.environ, "CC": "/bin/false"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_without_the_native_part_workers_go_over_gloo_and_say_so_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "shoal.cli", "run", str(tmp_path / "train.py"), "-n", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Torch [2.0, 2.0, 2.0]" in done.stdout
    assert (done.stdout + done.stderr).count("no shared memory") == 1


def test_a_native_part_of_older_sources_counts_as_not_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shoal.transport.shm, "_shm", ModuleType("_shm"), raising=False)
    spec = spec_from_file_location("segment_of_newer_sources", segment.__file__)
    assert spec is not None and spec.loader is not None
    newer = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, newer)  # dataclasses look there
    spec.loader.exec_module(newer)
    assert not newer.is_built() and "older than its sources" in newer.NOT_BUILT
