"""`shoal verify` of scripts that exit, fail or draw by chance: a true verdict or a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import scripts
from tests.scripts import shoal

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
    (tmp_path / "train.py").write_text(scripts.PLAIN.replace(before, after))
    done = shoal("verify", "train.py", "--steps", "3", cwd=tmp_path)
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
    (tmp_path / "train.py").write_text(scripts.PLAIN.replace(*BY_CHANCE[what]))
    done = shoal("verify", "train.py", "--steps", "3", cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert f"differ, so there is nothing to compare: {what}" in done.stderr


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
    (tmp_path / "train.py").write_text(scripts.PLAIN.replace(*EQUAL[how]))
    words = ["--", "--lr", "1"] if how == "takes arguments" else []
    done = shoal("verify", "train.py", "--steps", "3", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("equal: train.py under ddp on 2 workers, 3 steps\n")
    assert ("the first call is compared" in done.stderr) is (how == "runs twice")


@pytest.mark.whole
def test_a_failure_of_one_worker_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.FAILS_ON_RANK_1)
    done = shoal("verify", "train.py", "--steps", "5", cwd=tmp_path)
    assert done.returncode == 1 and "the seventh seal is broken" in done.stderr
    assert "worker 1 failed" in done.stderr and not done.stdout


def test_other_samples_in_a_later_step_are_not_taken_for_amplified_rounding(tmp_path: Path) -> None:
    """A change that is small, after the first steps, which are compared in double precision."""
    other = "batch[0] * (1.0005 if job.size > 1 and job.steps > 3 else 1), batch[1]"
    (tmp_path / "train.py").write_text(scripts.PLAIN.replace("step(batch)", f"step(({other}))"))
    done = shoal("verify", "train.py", "--steps", "6", cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "first difference in double precision, which is an error" in done.stdout
