"""Ranks that are started again beside the store of ranks before them, as torchrun does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.comm.store.authenticated import own_generation
from shoal.errors import ShoalError
from shoal.transport.shm.segment import is_built
from tests.comm.torch_ranks import forked_ranks

ROOT = Path(__file__).parents[2]
native = pytest.mark.skipif(not is_built(), reason="built without a compiler")


def start(store: Any, size: int) -> list[Any]:
    """The parts of the store that ranks which start together get."""
    with ThreadPoolExecutor(size) as pool:
        parts = pool.map(lambda rank: own_generation(store, rank, size, 20.0), range(size))
        return list(parts)


def test_ranks_of_one_start_share_their_keys_and_no_others_do_whatever_their_number() -> None:
    store = dist.HashStore()
    for size in (2, 2, 4, 3, 1):
        parts = start(store, size)
        assert not parts[-1].check(["key"])
        parts[0].set("key", str(size))
        assert [int(part.get("key")) for part in parts] == [size] * size


@pytest.mark.parametrize("left", [["hello/1"], ["hello/1", "hello/2"]])
def test_words_of_ranks_that_ended_before_the_others_came_are_not_taken(left: list[str]) -> None:
    store = dist.HashStore()
    for key in left:
        store.set(key, "word of a rank that is gone")
    parts = start(store, 3)
    parts[0].set("key", "0")
    assert [part.get("key") for part in parts] == [b"0"] * 3


def test_rank_0_names_the_ranks_that_do_not_come() -> None:
    store = dist.HashStore()
    for peer in (1, 2):
        store.set(f"hello/{peer}", "word of a rank that is gone")
    with pytest.raises(ShoalError, match="rank 0 waits for rank 1, 2"):
        own_generation(store, 0, 3, timeout_s=0.0)


@native
def test_killed_ranks_start_again_with_shared_memory_in_the_same_store(tmp_path: Path) -> None:
    def body(rank: int) -> list[Any]:
        data = torch.ones(3)
        dist.all_reduce(data)
        kind = type(dist.group.WORLD.executor).__name__  # type: ignore[union-attr]
        return [kind, data.tolist()]

    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def one_start(end: Any) -> list[Any]:
        def main(rank: int) -> Any:
            store = dist.TCPStore("localhost", server.port)
            dist.init_process_group("shoal", store=store, rank=rank, world_size=2)
            found = body(rank)
            return end(found)

        return forked_ranks(main, 2)

    assert one_start(lambda _: os.kill(os.getpid(), signal.SIGKILL)) == [None, None]
    assert one_start(lambda found: found) == [["SharedMemory", [2.0] * 3]] * 2


PROGRAM = """
import os, signal, sys, torch, torch.distributed as dist, shoal
dist.init_process_group("shoal")
data = torch.ones(3)
dist.all_reduce(data)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if first and dist.get_rank() == 1:
    {failure}
dist.all_reduce(data)
print(type(dist.group.WORLD.executor).__name__, data.tolist(), flush=True)
dist.destroy_process_group()
"""


@native
@pytest.mark.whole
@pytest.mark.parametrize(
    "failure", ["raise OSError", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_torchrun_starts_failed_ranks_again(tmp_path: Path, failure: str) -> None:
    (tmp_path / "script.py").write_text(PROGRAM.format(failure=failure))
    words = "torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 script.py"
    done = subprocess.run(
        [sys.executable, "-m", *words.split()],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for word in ("SharedMemory", "[4.0, 4.0, 4.0]"):  # lines of two ranks may be mixed
        assert done.stdout.count(word) == 2, done.stdout
    assert "over Gloo" not in done.stderr
