"""What shoal.run returns: a sweep chooses its next setting by it, in a loop, threads or a pool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shoal
from tests import forked

HEAD = """
import json, os, random, shoal, torch
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial

def train(job, lr, scale=1):
    with open("trained", "a") as file:
        file.write(f"{job.rank} {lr}\\n")
    total = torch.tensor([lr * scale])
    job.group.all_reduce(total).wait()
    return {"lr": lr, "sum": float(total), "rank": job.rank, "pair": (1, torch.ones(2))}

def fails(job):
    raise RuntimeError("of the user's own")

def one(lr):
    return shoal.run(train, lr, workers=2)["lr"]

if __name__ == "__main__":
"""
LOOP = """
    results = []
    for _ in range(2):
        lr = random.random() if not results else results[0]["sum"] + random.random()
        results.append(shoal.run(partial(train, scale=10), lr, workers=2))
        results[-1]["given"] = lr
        assert results[-1].pop("pair")[1].tolist() == [1, 1]
    try:
        shoal.run(fails, workers=2)
    except shoal.ShoalError as error:
        results.append(str(error).splitlines()[-1])
    try:
        shoal.run(lambda job: torch.nn.Linear(2, 2), workers=2)
    except shoal.BadInput as error:
        results.append(str(error))
    print(json.dumps(results))
"""
POOL = """
    with {pool}(2) as pool:
        print(json.dumps(list(pool.map(one, [1.0, 2.0, 3.0]))))
"""


def run(start: Any, folder: Path, body: str) -> Any:
    (folder / "sweep.py").write_text(HEAD + body)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 100}
    command = [sys.executable, "sweep.py"]
    done = start(command, cwd=folder, env=environ, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_loop_gets_the_values_of_rank_0_and_workers_the_arguments_and_outcomes_of_the_loop(
    tmp_path: Path,
) -> None:
    first, second, error, refusal = run(subprocess.run, tmp_path, LOOP)
    for result in (first, second):
        assert result["rank"] == 0 and result["lr"] == result["given"]
        assert result["sum"] == pytest.approx(20 * result["lr"])
    assert second["lr"] >= first["sum"]
    assert error == "RuntimeError: of the user's own"
    assert refusal.startswith("the training is done, and its function has returned a Linear")


@pytest.mark.parametrize("pool", ["ThreadPoolExecutor", "ProcessPoolExecutor"])
def test_a_pool_trains_each_of_its_settings_once(tmp_path: Path, pool: str) -> None:
    assert run(forked.run, tmp_path, POOL.replace("{pool}", pool)) == [1.0, 2.0, 3.0]
    trained = sorted((tmp_path / "trained").read_text().splitlines())
    assert trained == [f"{rank} {lr}" for rank in (0, 1) for lr in (1.0, 2.0, 3.0)]


def test_a_child_of_a_worker_does_not_take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_RANK", "1")
    monkeypatch.setattr("multiprocessing.parent_process", object)
    with pytest.raises(shoal.BadInput, match=r"a child process of worker 1 calls shoal\.run"):
        shoal.run(lambda job: None)
