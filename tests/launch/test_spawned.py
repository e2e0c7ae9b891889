"""Ranks that a script starts itself, as PyTorch's tutorials do: shoal.run joins them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.runtime.secret import new_secret
from tests import forked, namespaces
from tests.launch.helpers import ROOT, free_port

# each host starts its ranks, with the number of the first of them
SCRIPT = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import shoal

def tell(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # as one piece
    sys.stdout.flush()

def train(job):
    data = torch.ones(1)
    job.group.all_reduce(data).wait()
    tell(job.rank, job.group.size, job.local_rank, job.local_size, data.item())

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
    tell(rank, size, torch.equal(*weights))
    dist.destroy_process_group()

def work(index, how, first, size):
    globals()[how](first + index, size)

if __name__ == "__main__":
    how, method, first, count, size = sys.argv[1:3] + [int(word) for word in sys.argv[3:]]
    mp.start_processes(work, args=(how, first, size), nprocs=count, start_method=method)
"""
TOLD = {
    "by_variables": ["0 2 0 2 2.0", "1 2 1 2 2.0"],
    "by_process_group": ["0 2 0 2 2.0", "1 2 1 2 2.0"],
    "tutorial": ["0 2 True", "1 2 True"],
}
PLAIN = {name: text for name, text in os.environ.items() if not name.startswith("SHOAL_")}


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path / "script.py")


def told(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line[:1].isdigit())


@pytest.mark.parametrize(
    ("how", "method"),
    [
        *((how, "fork") for how in TOLD),
        *(pytest.param(how, "spawn", marks=pytest.mark.whole) for how in TOLD),
    ],
)
def test_a_script_starts_its_ranks_with_multiprocessing(script: str, how: str, method: str) -> None:
    run = forked.run if method == "fork" else subprocess.run
    master = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    environ = {**PLAIN, **master, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, how, method, "0", "2", "2"]
    done = run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == TOLD[how]


@pytest.mark.whole
@pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not())
@pytest.mark.parametrize(
    ("counts", "how"),
    [((2, 2), "by_variables"), ((3, 1), "by_variables"), ((1, 2), "by_process_group")],
)
def test_a_script_that_spawns_ranks_on_two_hosts(
    script: str, tmp_path: Path, counts: tuple[int, int], how: str
) -> None:
    size = sum(counts)
    with namespaces.two_hosts() as hosts:
        master = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(free_port())}
        keys = {"SHOAL_SECRET": new_secret().hex(), "SHOAL_TRUSTED_NETWORK": "1"}
        own = {**keys, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
        environ = {**PLAIN, **master, **own}
        started = [
            host.run(
                [sys.executable, script, how, "spawn", str(first), str(count), str(size)],
                {**environ, "GLOO_SOCKET_IFNAME": host.device},
            )
            for host, first, count in zip(hosts, (0, counts[0]), counts, strict=True)
        ]
        text = "".join(process.communicate(timeout=120)[0] for process in started)
    local = [(i, count) for count in counts for i in range(count)]
    expected = [f"{rank} {size} {i} {n} {float(size)}" for rank, (i, n) in enumerate(local)]
    assert told(text) == expected, text
