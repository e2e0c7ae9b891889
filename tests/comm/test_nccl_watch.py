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

from shoal.comm.executors import nccl_watch
from shoal.comm.executors.nccl import GpuWork, NcclCalls
from shoal.comm.executors.nccl_watch import NcclWatch
from shoal.comm.group import Group
from shoal.comm.transport.shm.segment import is_built
from shoal.errors import PeerLost
from shoal.runtime import clock
from tests.comm.test_shared_memory_processes import on_shm_processes
from tests.comm.threads import memory_of, on_shm_threads
from tests.server.coordinator.helpers import until

pytestmark = pytest.mark.skipif(not is_built(), reason="built without a compiler")


class End:
    """An event of a GPU that does not come."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        """NCCL was aborted: the GPU goes on."""


def watched(
    group: Group, limit_s: float = 1800.0, waits_in: str = ""
) -> tuple[NcclWatch, Any, list[PeerLost]]:
    calls = NcclCalls(record=End)
    calls.latest = "all_reduce #3 over NCCL"
    if waits_in:
        calls.wait(waits_in, clock.monotonic_ns())
    found: list[PeerLost] = []
    ended = threading.Event()

    def end(lost: PeerLost) -> None:
        found.append(lost)
        ended.set()

    watch = NcclWatch(memory_of(group), calls, end, limit_s)
    return watch, SimpleNamespace(ended=ended, calls=calls), found


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
        watch, at, found = watched(group, 0.01, "all_reduce #3 over NCCL")
        with watch:
            assert at.ended.wait(20)
        return found

    for found in on_shm_threads(2, body):
        assert found[0].after_s == 0.01 and "all_reduce #3 over NCCL" in str(found[0])


def test_a_rank_that_others_wait_for_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_watch, "_LONG_S", 0.0)
    monkeypatch.setattr(nccl_watch, "_PERIOD_S", 0.01)
    is_known = threading.Event()
    both_know = threading.Barrier(2)

    def body(group: Group) -> str:
        watch, _, _ = watched(group, waits_in="" if group.rank == 2 else "all_reduce #4 over NCCL")
        with watch:
            if group.rank == 2:
                assert is_known.wait(20)
                return ""
            until(lambda: watch.current_wait() is not None, "an answer")
            whom = watch.current_wait().whom
            both_know.wait(20)
            is_known.set()
        return str(whom)

    first, second, _ = on_shm_threads(3, body)
    assert first == second == "rank 2 (has called nothing since all_reduce #3 over NCCL)"


def test_a_stopped_rank_is_named_and_killed_at_the_limit() -> None:
    def body(group: Group) -> str:
        watch, at, found = watched(group, 0.01)
        with watch:
            if group.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            until(lambda: memory_of(group).segment.is_stopped(1), "rank 1 stops")
            at.calls.wait("all_reduce #3 over NCCL", clock.monotonic_ns())
            assert at.ended.wait(20)
        return str(found[0])

    said, _ = on_shm_processes(2, body)
    assert said.startswith("rank 0 lost rank 1 after 0.01 s in all_reduce #3 over NCCL (rank 1: ")
    assert "is stopped" in said


def test_a_wait_for_a_lost_rank_ends_with_its_loss_in_elastic_runs() -> None:
    calls = NcclCalls(confirms=True, record=End)
    calls.wait("all_reduce #2 over NCCL", 0)
    calls.lose(PeerLost(0, 1, "all_reduce #3 over NCCL"))
    with pytest.raises(PeerLost, match="rank 0 lost rank 1 in all_reduce #4 over NCCL"):
        calls.wait("all_reduce #4 over NCCL", 0)


def test_a_call_that_was_waited_for_holds_no_tensors() -> None:
    tensors = torch.zeros(4)
    of_torch = SimpleNamespace(block_current_stream=lambda: None, tensors=tensors)
    calls = NcclCalls(record=End)
    GpuWork([of_torch], calls, "all_reduce #3 over NCCL", 0).wait()
    held = weakref.ref(tensors)
    del of_torch, tensors
    assert calls.unfinished() is not None and held() is None
