"""Workers that share a GPU exchange tensors in its memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import script, shoal

pytestmark = pytest.mark.gpu

COLLECTIVES = script("""
import torch
from shoal.comm.group import Group, Op
from shoal.comm.executors import shared_gpu

def numbers(rank, n, dtype):
    made = torch.Generator().manual_seed(rank)
    return torch.randn(n, generator=made).to(dtype).cuda()

def train(job):
    group, rank, size = job.group, job.rank, job.size
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for n in (1, 1000, 3_000_000, 20_000_000):
            given = [numbers(r, n, dtype) for r in range(size)]
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            total = given[0].to(wide)
            for each in given[1:]:
                total = total + each.to(wide)
            data = given[rank].clone()
            group.all_reduce(data).wait()
            assert torch.equal(data, total.to(dtype)), ("sum", dtype, n)
            data = given[rank].clone()
            group.all_reduce(data, Op.MAX).wait()
            assert torch.equal(data, torch.stack(given).amax(0)), ("max", dtype, n)
            data = given[rank].clone()
            group.broadcast(data, 1).wait()
            assert torch.equal(data, given[1]), ("broadcast", dtype, n)
            if n < 10_000_000:
                out = data.new_empty(size * n)
                group.all_gather(out, given[rank]).wait()
                assert torch.equal(out, torch.cat(given)), ("all_gather", dtype, n)
                pieces = [torch.cat([each] * size) for each in given]
                out = torch.empty_like(data)
                group.reduce_scatter(out, pieces[rank]).wait()
                assert torch.equal(out, total.to(dtype)), ("reduce_scatter", dtype, n)
    count = torch.ones(3, dtype=torch.int64).cuda()
    group.all_reduce(count).wait()
    assert count.tolist() == [size] * 3
    works = [group.all_reduce(torch.ones(1000).cuda()) for _ in range(500)]
    for work in works:
        work.wait()
    assert type(group.executor._gpu) is shared_gpu.SharedGpu
    job.print("all equal")
""")

MISMATCH = script("""
import torch

def train(job):
    job.group.all_reduce(torch.ones(8).cuda()).wait()
    job.group.all_reduce(torch.ones(10 + job.rank).cuda()).wait()
""")

LOST = script("""
import os, signal, torch

def train(job):
    job.group.all_reduce(torch.ones(8).cuda()).wait()
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    job.group.all_reduce(torch.ones(8).cuda()).wait()
""")


def test_collectives_in_the_memory_of_a_gpu_have_the_bits_of_a_sum_by_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COLLECTIVES)
    done = shoal("run", "-n", "3", "-s", "ddp", "--device", "cuda:0", "train.py", cwd=tmp_path)
    assert "all equal" in done.stdout, done.stderr


def test_ranks_that_call_other_sizes_on_a_gpu_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MISMATCH)
    done = shoal("run", "-n", "2", "-s", "ddp", "--device", "cuda:0", "train.py", cwd=tmp_path)
    assert done.returncode != 0
    assert "all_reduce of 10 numbers" in done.stderr
    assert "all_reduce of 11 numbers" in done.stderr


def test_a_killed_worker_on_a_shared_gpu_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOST)
    done = shoal("run", "-n", "3", "-s", "ddp", "--device", "cuda:0", "train.py", cwd=tmp_path)
    assert done.returncode != 0
    assert "worker 1" in done.stderr, done.stderr
