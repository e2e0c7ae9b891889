"""On a machine with a CUDA GPU: servers that keep weights and optimizer there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import script, shoal

pytestmark = pytest.mark.gpu

SCRIPT = script("""
def train(job):
    adamw = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
    step = job.step(model(), loss, optimizer=adamw, clip_norm=0.5)
    for batch in job.batches(data, batch_size=20, epochs=3):
        value = step(batch)
    job.print("loss", float(value))
""")


def final_loss(tmp_path: Path, *words: str) -> float:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = shoal("run", "train.py", *words, "--device", "cuda", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[-1])


@pytest.mark.parametrize("placement", ["rank0", "workers"])
@pytest.mark.parametrize("workers", ["1", "2", "4"])
def test_workers_that_share_a_gpu_with_servers_equal_one_device(
    tmp_path: Path, placement: str, workers: str
) -> None:
    alone = final_loss(tmp_path, "-n", "1", "-s", "single")
    strategy = f'ps(placement="{placement}", on="cuda")'
    together = final_loss(tmp_path, "-n", workers, "-s", strategy)
    assert together == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("rule", ["quorum=0.5", "staleness=2", 'mode="async"'])
def test_relaxed_rules_train_on_a_gpu(tmp_path: Path, rule: str) -> None:
    strategy = f'ps({rule}, placement="rank0", on="cuda")'
    assert final_loss(tmp_path, "-n", "2", "-s", strategy) < 5.0


def test_pushes_of_workers_on_the_gpu_of_the_server_do_not_pass_through_the_host(
    tmp_path: Path,
) -> None:
    strategy = 'ps(placement="rank0", on="cuda")'
    (tmp_path / "train.py").write_text(SCRIPT)
    done = shoal("run", "train.py", "-n", "2", "-s", strategy, "--device", "cuda", cwd=tmp_path)
    assert "gradients and weights by memory of the GPU" in done.stderr


def test_a_worker_on_a_gpu_that_is_killed_comes_back(tmp_path: Path) -> None:
    words = ("-s", 'ps(mode="async", placement="rank0", on="cuda")', "--kill", "1@5")
    assert final_loss(tmp_path, "-n", "3", *words, "--restart", "1") < 5.0
