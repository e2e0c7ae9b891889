"""zero in processes: against FSDP2, and under a memory limit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.products import few_or_all
from tests.scripts import shoal, started
from tests.sync import zero_scripts


def last_json(text: str) -> list[object]:
    found = json.loads(text.strip().splitlines()[-1].removeprefix("[0] "))
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("strategy", [pytest.param("zero(2)", marks=pytest.mark.whole), "zero(3)"])
def test_losses_are_those_of_fsdp2(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "train.py").write_text(zero_scripts.AGAINST_FSDP)
    done = shoal("run", "train.py", "-n", "2", "-s", strategy, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ours, theirs = last_json(done.stdout)
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert len(ours) == 12 and ours[-1] < ours[0]  # type: ignore[arg-type, index]


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
@pytest.mark.whole
def test_a_model_too_large_for_one_worker_trains_on_two(tmp_path: Path) -> None:
    """AdamW alone takes 512 MB (parameters, gradients, state); each of two takes half of that."""
    (tmp_path / "train.py").write_text(zero_scripts.LARGE)
    # without reserved arenas, and without what a fork inherits: the limit counts what is used
    env = {"MIMALLOC_ARENA_RESERVE": "0", "MIMALLOC_PURGE_DELAY": "0"}
    alone = shoal("run", "train.py", cwd=tmp_path, **env)
    assert alone.returncode == 0, alone.stderr
    env["MEGABYTES"] = "440"
    refused = started("run", "train.py", cwd=tmp_path, **env)
    assert refused.returncode == 1 and "memory" in refused.stderr.splitlines()[-1]
    for strategy in few_or_all(["zero(3)"], ["zero(3)", "pp(2)"]):
        split = started("run", "train.py", "-n", "2", "-s", strategy, cwd=tmp_path, **env)
        assert split.returncode == 0, split.stderr
        assert last_json(split.stdout) == pytest.approx(last_json(alone.stdout), abs=1e-5)
