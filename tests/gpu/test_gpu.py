"""On a machine with a CUDA GPU: mixed precision, NCCL, and workers that share one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.transport.shm.segment import is_built
from tests.devices import NUM_GPUS
from tests.scripts import HEAD, json_of, shoal

pytestmark = pytest.mark.gpu

BACKEND = (
    HEAD
    + """
import torch.distributed as dist

def train(job):
    step = job.step(model(), loss, optimizer=sgd)
    for batch in job.batches(data, batch_size=20):
        value = step(batch)
    job.print(dist.get_backend(), job.device, type(job.group.executor).__name__, float(value))

if __name__ == "__main__":
    shoal.run(train)
"""
)


def run_gpt(tmp_path: Path, *words: str) -> list[float]:
    options = ["--size", "tiny", "--steps", "40"]
    done = shoal("run", "gpt", "--device", "cuda", *words, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if "loss" in line and "step" in line]
    return [float(line[line.index("loss") + 1]) for line in lines]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gpt_learns_alone_in_every_precision(tmp_path: Path, precision: str) -> None:
    losses = run_gpt(tmp_path, "--", "--precision", precision)
    assert losses[-1] < losses[0] - 0.5


def test_one_worker_under_ddp_goes_over_nccl(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BACKEND)
    done = shoal("run", "train.py", "-n", "1", "-s", "ddp", cwd=tmp_path)
    assert done.stdout.split()[:3] == ["nccl", "cuda:0", "Torch"], done.stderr


def test_workers_that_share_a_gpu_go_through_the_hosts_memory(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BACKEND)
    workers = str(NUM_GPUS + 1)
    done = shoal("run", "train.py", "-n", workers, "-s", "ddp", cwd=tmp_path)
    words = done.stdout.removeprefix("[0] ").split()[:3]
    assert words == ["gloo", "cuda:0", "SharedMemory" if is_built() else "Torch"], done.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_verify_passes(tmp_path: Path, workers: str, precision: str) -> None:
    words = f"verify gpt -n {workers} -s ddp --device cuda --steps 10 --json"
    size = ("--", "--size", "tiny", "--precision", precision)
    done = shoal(*words.split(), *size, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    print(json_of(done))


def test_digits_with_batchnorm_verify_on_two_workers_that_share_a_gpu(tmp_path: Path) -> None:
    done = shoal("verify", "digits", "-n", "2", "--device", "cuda", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gossip_between_workers_that_share_a_gpu(tmp_path: Path, mode: str) -> None:
    (tmp_path / "train.py").write_text(BACKEND)
    workers = str(max(4, NUM_GPUS + 1))
    done = shoal("run", "train.py", "-n", workers, "-s", f'gossip(mode="{mode}")', cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cuda:0" in done.stdout
