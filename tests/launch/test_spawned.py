"""Ranks that a script starts itself, as PyTorch's tutorials do: shoal.run joins them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import forked

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
    mp.start_processes(globals()[sys.argv[1]], args=(2,), nprocs=2, start_method="fork")
"""


@pytest.mark.parametrize("how", ["by_variables", "by_process_group"])
def test_a_script_starts_its_ranks_with_multiprocessing(tmp_path: Path, how: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = forked.run(
        [sys.executable, str(tmp_path / "script.py"), how], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert sorted(lines) == ["0 2 [2.0, 2.0]", "1 2 [2.0, 2.0]"]
