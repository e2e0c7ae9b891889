"""`shoal verify` says yes where it should, and no where it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import scripts
from tests.scripts import json_of, shoal


def verify(tmp_path: Path, script: str, *words: str) -> tuple[int, dict[str, Any]]:
    (tmp_path / "train.py").write_text(script)
    done = shoal("verify", "train.py", *words, "--json", cwd=tmp_path)
    assert done.stdout, done.stderr
    return done.returncode, json_of(done)


def test_ddp_is_equal_on_a_users_script_and_nothing_is_saved(tmp_path: Path) -> None:
    status, found = verify(tmp_path, scripts.SAVES, "-n", "3", "--steps", "8")
    assert (status, found["ok"], found["steps"]) == (0, True, 8)
    assert found["replicas_apart"] == 0
    assert found["largest_tensor_difference"]["tolerance"] < 1e-3
    assert not (tmp_path / "checkpoint").exists()


def test_a_broken_reduction_is_named_by_its_tensor_and_step(tmp_path: Path) -> None:
    status, found = verify(tmp_path, scripts.BROKEN_REDUCTION, "-n", "2", "--steps", "5")
    assert (status, found["ok"]) == (1, False)
    # doubled after the first step: the loss differs from the second on
    assert found["first_loss_that_differs"]["what"] == "step 2"
    assert found["largest_tensor_difference"]["what"] == "2.bias"


def test_a_loss_that_is_a_sum_is_found_in_the_first_step(tmp_path: Path) -> None:
    """Cutting a batch changes a sum, so the run that measures rounding is wrong as well."""
    total = 'model(), lambda *given: loss(*given, reduction="sum"),'
    script = scripts.PLAIN.replace("model(), loss,", total)
    status, found = verify(tmp_path, script, "-n", "2", "--steps", "3")
    assert (status, found["ok"]) == (1, False)
    assert found["first_loss_that_differs"]["what"] == "step 1"


@pytest.mark.parametrize("example", ["digits", pytest.param("gpt", marks=pytest.mark.whole)])
def test_the_examples_are_equal(tmp_path: Path, example: str) -> None:
    small = ["--size", "tiny"] if example == "gpt" else ["--accumulate", "2", "--clip-norm", "1"]
    done = shoal("verify", example, "-n", "2", "--steps", "6", "--json", "--", *small, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json_of(done)["ok"] is True


def test_stages_with_a_server_are_equal_by_processes(tmp_path: Path) -> None:
    status, found = verify(tmp_path, scripts.DEEP, "-n", "4", "-s", "ps + pp(2)", "--steps", "4")
    assert (status, found["ok"], found["replicas_apart"]) == (0, True, 0)


def test_workers_of_several_hosts_give_the_result_of_one(tmp_path: Path) -> None:
    """Workers 0 and 1 are said to be on one host and share its memory, worker 2 on another."""
    where = 'os.environ["SHOAL_HOST_ID"] = str(int(os.environ.get("SHOAL_RANK", "0")) // 2)\n'
    look = "    assert job.size == 1 or type(job.group.executor).__name__ == 'Hierarchical'\n"
    script = scripts.PLAIN.replace("def train(job):\n", where + "def train(job):\n" + look)
    status, found = verify(tmp_path, script, "-n", "3", "--steps", "5")
    assert (status, found["ok"], found["replicas_apart"]) == (0, True, 0)


def test_fewer_steps_than_asked_for_are_explained(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    done = shoal("verify", "train.py", "-n", "2", "-s", "mapreduce", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "running alone: up to 20 steps\n" in done.stderr
    equal = "equal: train.py under mapreduce on 2 workers"
    steps = "2 steps over the whole dataset each (the script takes no more)"
    assert done.stdout.endswith(f"{equal}, {steps}\n")
