"""Ranks over NCCL end with one sentence when another one is lost; NCCL is not needed for that."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.comm.executors.nccl import LatestCall
from shoal.comm.executors.nccl_watch import NcclWatch
from shoal.comm.group import Group
from shoal.errors import PeerLost
from shoal.transport.shm.segment import is_built
from tests.comm.test_shared_memory_processes import on_shm_processes
from tests.comm.threads import memory_of, on_shm_threads

pytestmark = pytest.mark.skipif(not is_built(), reason="built without a compiler")


class Unfinished:
    def is_completed(self) -> bool:
        return False


def watched(group: Group, limit_s: float = 1800.0) -> tuple[NcclWatch, Any, list[PeerLost]]:
    nccl: Any = SimpleNamespace(rank=group.rank, size=group.size)
    nccl.latest = LatestCall("all_reduce #3 over NCCL")
    found: list[PeerLost] = []
    ended = threading.Event()

    def end(lost: PeerLost) -> None:
        found.append(lost)
        ended.set()

    watch = NcclWatch(nccl, memory_of(group), end, limit_s)
    return watch, SimpleNamespace(ended=ended, nccl=nccl), found


def test_a_rank_that_fails_is_named_with_the_operation() -> None:
    def body(group: Group) -> list[PeerLost]:
        watch, at, found = watched(group)
        with suppress(ValueError), watch:
            if group.rank == 2:
                raise ValueError("a mistake of the script")
            assert at.ended.wait(20)
        return found

    for rank, found in enumerate(on_shm_threads(3, body)[:2]):
        assert str(found[0]).startswith(f"rank {rank} lost rank 2 in all_reduce #3 over NCCL")


def test_a_killed_rank_is_named_by_one_whose_connection_broke_and_by_those_that_it_leaves() -> None:
    def body(group: Group) -> str:
        watch, at, found = watched(group)
        with suppress(PeerLost), watch:
            if group.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if group.rank == 2:
                raise PeerLost(2, None, "all_reduce #3 over NCCL (remote process exited)")
            assert at.ended.wait(20)
        return str(found[0])

    for rank, found in enumerate(on_shm_processes(3, body)):
        if rank != 1:
            assert found.startswith(f"rank {rank} lost rank 1 in all_reduce #3 over NCCL (killed")


def test_ranks_that_finish_one_after_the_other_lose_none() -> None:
    first_is_gone = threading.Event()

    def body(group: Group) -> list[PeerLost]:
        watch, _, found = watched(group)
        with watch:
            if group.rank:
                assert first_is_gone.wait(20)
                watch.poke()
        if group.rank == 0:
            first_is_gone.set()
        return found

    assert on_shm_threads(3, body) == [[], [], []]


def test_a_call_that_does_not_end_within_the_limit_of_the_run_is_named() -> None:
    def body(group: Group) -> list[PeerLost]:
        watch, at, found = watched(group, limit_s=0.01)
        at.nccl.latest.works = [Unfinished()]
        with watch:
            assert at.ended.wait(20)
        return found

    for found in on_shm_threads(2, body):
        assert found[0].after_s == 0.01 and "all_reduce #3 over NCCL" in str(found[0])


def test_the_tensors_of_a_call_that_a_gpu_has_done_are_released() -> None:
    tensors = torch.zeros(4)
    done = SimpleNamespace(is_completed=lambda: True, tensors=tensors)
    latest = LatestCall(works=[done])
    held = weakref.ref(tensors)
    del done, tensors
    assert held() is not None
    assert latest.unfinished_since_ns() is None and held() is None
