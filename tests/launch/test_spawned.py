"""Ranks that a script starts itself, as PyTorch's tutorials do: shoal.run joins them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.launch.helpers import ROOT

SCRIPT = """
import os, random, socket, sys
from contextlib import suppress
import torch, torch.distributed as dist, torch.multiprocessing as mp
import shoal

def train(job):
    data = torch.ones(2)
    job.group.all_reduce(data).wait()
    sys.stdout.write(f"{job.rank} {job.group.size} {data.tolist()}\\n")  # as one piece
    sys.stdout.flush()

def by_variables(rank, size):
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)
    shoal.run(train, strategy="ddp")

def by_process_group(rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    shoal.run(train, strategy="ddp")
    dist.barrier()  # it is still the script's
    dist.destroy_process_group()

def tutorial(rank, size):  # as in "Getting started with DistributedDataParallel"
    dist.init_process_group("shoal", rank=rank, world_size=size)
    torch.manual_seed(rank)  # the weights of rank 0 count
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5))
    loss.backward()
    optimizer.step()
    weights = [torch.empty(5, 10) for _ in range(size)]
    dist.all_gather(weights, model.module.weight.detach())
    sys.stdout.write(f"{rank} {size} {torch.equal(*weights)}\\n")
    sys.stdout.flush()
    dist.destroy_process_group()

def free_port():  # below those that the kernel gives out: no other process takes it meanwhile
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        end = int(file.read().split()[0])
    while True:
        port = random.randrange(end // 2, end)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("localhost", port))
            return port

if __name__ == "__main__":
    port = free_port()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    mp.start_processes(globals()[sys.argv[1]], args=(2,), nprocs=2, start_method=sys.argv[2])
"""


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if not line.startswith("[Gloo]"))


EXPECTED = {
    "by_variables": ["0 2 [2.0, 2.0]", "1 2 [2.0, 2.0]"],
    "by_process_group": ["0 2 [2.0, 2.0]", "1 2 [2.0, 2.0]"],
    "tutorial": ["0 2 True", "1 2 True"],
}


@pytest.mark.parametrize("how", EXPECTED)
def test_a_script_starts_its_ranks_with_multiprocessing(tmp_path: Path, how: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), how, "fork"]
    assert lines_of(forked.run(command, capture_output=True, text=True)) == EXPECTED[how]


@pytest.mark.whole
@pytest.mark.parametrize("how", ["by_variables", "tutorial"])
def test_a_script_starts_its_ranks_with_mp_spawn(tmp_path: Path, how: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), how, "spawn"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert lines_of(done) == EXPECTED[how]
