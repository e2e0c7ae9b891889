"""`shoal eval` of a script of one's own: its test function, on any number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import json_of, script, shoal

SCRIPT = script("""
def accuracy(outputs, targets):
    return {"accuracy": (outputs.argmax(1) == targets).double().mean()}

def test(job, checkpoint):
    job.step(model(), loss, optimizer=sgd)
    job.load(checkpoint)
    assert sys.argv[1:] == ["--mode", "test"]
    return {**job.evaluate(accuracy, data, batch_size=20), "workers": job.size}

def train(job):
    step = job.step(model(), loss, optimizer=sgd)
    for batch in job.batches(data, batch_size=20, epochs=2):
        job.log(loss=step(batch))
    job.save("saved")
    job.print(job.evaluate(accuracy, data)["accuracy"])
""")


def test_a_checkpoint_is_tested_by_its_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    trained = shoal("run", "train.py", cwd=tmp_path)
    words = ["eval", "-n", "2", "--json", "saved", "train.py", "--mode", "test"]
    found = json_of(shoal(*words, cwd=tmp_path))
    assert found["accuracy"] == pytest.approx(float(trained.stdout.split()[-1]))
    assert found["workers"] == 2
    (tmp_path / "other.py").write_text(SCRIPT.replace("def test", "def _test"))
    refused = shoal("eval", "saved", "other.py", cwd=tmp_path)
    assert refused.returncode == 2
    assert "other.py has no function evaluate(job, checkpoint)" in refused.stderr
