from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

import shoal.comm.transport.shm
from shoal.comm.network import HostNetwork
from shoal.comm.select import share_memory
from shoal.comm.transport.shm import segment
from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from tests.comm.threads import on_ranks
from tests.scripts import shoal as shoal_command

ROOT = Path(__file__).parents[3]
SCRIPT = """
import torch, shoal
from shoal.comm.transport.shm import segment
segment._shm = None  # as if it had not been built

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
    done = shoal_command("run", "-n", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Torch [2.0, 2.0, 2.0]" in done.stdout
    assert (done.stdout + done.stderr).count("no shared memory") == 1


def test_several_hosts_without_the_native_part_are_refused_on_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segment, "_shm", None)
    store = dist.HashStore()

    def join(rank: int) -> None:
        with pytest.raises(BadInput, match="without a compiler: install a C compiler on every"):
            share_memory(store, rank, 2, 20.0, HostNetwork(RunConfig(host_id=f"host {rank}")))

    on_ranks(2, join)


def new_segment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as it is when it is imported now."""
    spec = spec_from_file_location("segment_of_newer_sources", segment.__file__)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_a_native_part_that_is_not_there_counts_as_not_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(shoal.comm.transport.shm, "_shm", raising=False)
    monkeypatch.setitem(sys.modules, "shoal.comm.transport.shm._shm", None)
    without = new_segment(monkeypatch)
    assert not without.is_built() and "without a compiler" in without.NOT_BUILT


def test_a_native_part_of_older_sources_counts_as_not_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shoal.comm.transport.shm, "_shm", ModuleType("_shm"), raising=False)
    newer = new_segment(monkeypatch)
    assert not newer.is_built() and "older than its sources" in newer.NOT_BUILT
