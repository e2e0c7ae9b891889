"""`shoal verify` says yes, no, or in a sentence why it cannot tell, where it should."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import scripts, user_schedules
from tests.products import few_or_all
from tests.scripts import json_of, shoal


def printed(
    tmp_path: Path, script: str, *words: str, args: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(script)
    return shoal("verify", *words, "train.py", *args, cwd=tmp_path)


def verify(tmp_path: Path, script: str, *words: str) -> tuple[int, dict[str, Any]]:
    done = printed(tmp_path, script, *words, "--json")
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
    done = shoal("verify", "-n", "2", "--steps", "6", "--json", example, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json_of(done)["ok"] is True


OWN = 'ddp(algorithm="mine.py:for_two") + pp(2, schedule="mine.py:zigzag")'


@pytest.mark.parametrize("strategy", few_or_all([OWN], ["ps + pp(2)", OWN]))
def test_replicas_of_stages_are_equal_by_processes(tmp_path: Path, strategy: str) -> None:
    """`for_two` makes a schedule of two ranks: the four workers together do not use it."""
    (tmp_path / "mine.py").write_text(user_schedules.PIPELINES + user_schedules.COLLECTIVES)
    status, found = verify(tmp_path, scripts.DEEP, "-n", "4", "-s", strategy, "--steps", "4")
    assert (status, found["ok"], found["replicas_apart"]) == (0, True, 0)
    assert found["strategy"] == strategy


def test_workers_of_several_hosts_give_the_result_of_one(tmp_path: Path) -> None:
    """Workers 0 and 1 are said to be on one host and share its memory, worker 2 on another."""
    where = 'os.environ["SHOAL_HOST_ID"] = str(int(os.environ.get("SHOAL_RANK", "0")) // 2)\n'
    look = "    assert job.size == 1 or type(job.group.executor).__name__ == 'Hierarchical'\n"
    script = scripts.PLAIN.replace("def train(job):\n", where + "def train(job):\n" + look)
    status, found = verify(tmp_path, script, "-n", "3", "--steps", "5")
    assert (status, found["ok"], found["replicas_apart"]) == (0, True, 0)


def test_fewer_steps_than_asked_for_are_explained(tmp_path: Path) -> None:
    done = printed(tmp_path, scripts.PLAIN, "-n", "2", "-s", "mapreduce")
    assert done.returncode == 0, done.stderr
    assert "running alone: up to 20 steps\n" in done.stderr
    equal = "equal: train.py under mapreduce on 2 workers"
    steps = "2 steps over the whole dataset each (all that the script takes)"
    assert done.stdout.endswith(f"{equal}, {steps}\n")
    assert "was not reached" not in done.stderr


def test_that_the_rest_of_the_script_was_not_reached_is_said(tmp_path: Path) -> None:
    done = printed(tmp_path, scripts.PLAIN, "-n", "2", "--steps", "2")
    assert done.stdout.endswith("equal: train.py under ddp on 2 workers, 2 steps\n")
    assert "after 2 steps: what it does later, such as an evaluation, was not" in done.stderr


STEP = "job.log(loss=step(batch))"
IN_TRAIN = {
    "the loss of step 1 is nan": ("(model(), loss,", "(model(), lambda *b: loss(*b) * torch.nan,"),
    "ended without a training step": (STEP, "break"),
    "catches the exception that ends it": (STEP, "try: step(batch)\n        except: pass"),
}


@pytest.mark.parametrize("sentence", IN_TRAIN)
def test_what_cannot_be_compared_is_refused_in_a_sentence(tmp_path: Path, sentence: str) -> None:
    before, after = IN_TRAIN[sentence]
    assert before in scripts.PLAIN
    done = printed(tmp_path, scripts.PLAIN.replace(before, after), "--steps", "3")
    assert done.returncode == 2 and not done.stdout
    assert sentence in done.stderr and "Traceback" not in done.stderr


BY_CHANCE = {
    "0.bias before the first step": ("torch.manual_seed(0)", "torch.seed()"),
    "the loss of step 1": ("torch.Generator().manual_seed(1)", "torch.Generator(); g.seed()"),
}


@pytest.mark.whole
@pytest.mark.parametrize("what", BY_CHANCE)
def test_a_script_that_does_not_repeat_itself_is_not_called_unequal(
    tmp_path: Path, what: str
) -> None:
    done = printed(tmp_path, scripts.PLAIN.replace(*BY_CHANCE[what]), "--steps", "3")
    assert done.returncode == 2, done.stdout
    # ranks that are no forks of one process draw different data, which is refused at once
    assert re.search(f"nothing to compare: {what}|have different datasets", done.stderr)


ARGUMENTS = "import argparse; p = argparse.ArgumentParser(); p.add_argument('--lr', required=True)"
EQUAL = {
    "prints": (STEP, "step(batch); print('x' * 200_000); print('y' * 200_000, file=sys.stderr)"),
    "exits": ("    shoal.run(train)", "    shoal.run(train)\n    sys.exit(0)"),
    "exits in a step": (STEP, "step(batch)\n        if job.steps == 3: sys.exit(0)"),
    "takes arguments": ("def train", f"{ARGUMENTS}; p.parse_args()\ndef train"),
    "changes its environment": ("def train", "os.environ['OMP_NUM_THREADS'] = '1'\ndef train"),
    "has no main": ('if __name__ == "__main__":', "if True:"),
    "runs twice": ("    shoal.run(train)", "    shoal.run(train)\n    shoal.run(train)"),
}


@pytest.mark.whole
@pytest.mark.parametrize("how", EQUAL)
def test_scripts_as_people_have_them_are_equal(tmp_path: Path, how: str) -> None:
    args = ["--lr", "1"] if how == "takes arguments" else []
    done = printed(tmp_path, scripts.PLAIN.replace(*EQUAL[how]), "--steps", "3", args=args)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("equal: train.py under ddp on 2 workers, 3 steps\n")
    assert ("the first call is compared" in done.stderr) is (how == "runs twice")


def test_other_samples_in_a_later_step_are_not_taken_for_amplified_rounding(tmp_path: Path) -> None:
    """A change that is small, after the first steps, which are compared in double precision."""
    other = "batch[0] * (1.0005 if job.size > 1 and job.steps > 3 else 1), batch[1]"
    script = scripts.PLAIN.replace("step(batch)", f"step(({other}))")
    done = printed(tmp_path, script, "--steps", "6")
    assert done.returncode == 1, done.stdout
    assert "first difference in double precision, which is an error" in done.stdout
