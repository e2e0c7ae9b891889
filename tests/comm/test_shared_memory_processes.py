"""What only processes show: random work, sudden death, and what is left of it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.group import Group, Op
from shoal.errors import PeerLost
from shoal.runtime.run_dir import RunDir
from shoal.schedules.collectives.catalog import kinds
from shoal.transport.shm.segment import is_built
from shoal.transport.transport import Work
from tests.comm.cases import DTYPES, Case, call, check, given_to
from tests.comm.shm import ShmWorld, memory_of
from tests.products import few_or_all

pytestmark = pytest.mark.skipif(not is_built(), reason="built without a compiler")
KILLS = int(os.environ.get("SHOAL_TEST_KILLS", "6"))


@contextmanager
def shm_world(size: int, body: Any) -> Iterator[ShmWorld]:
    before = set(os.listdir("/dev/shm"))
    world = ShmWorld(size, body)
    try:
        yield world
    finally:
        world.close()
    assert set(os.listdir("/dev/shm")) == before


def loss_in(call: Callable[[], Work]) -> str:
    try:
        call().wait()
    except PeerLost as error:
        return str(error)
    return "nothing was raised"


def _one(group: Group, seed: int) -> None:
    """A collective that `seed` chooses, the same on every rank."""
    rng = random.Random(seed)
    numel = rng.choice([1, 7, 100, 4_000, 20_000, 200_000])
    dtype, op = rng.choice(["int64", "int32", "float64"]), rng.choice(["sum", "max"])
    kind = rng.choice([*kinds(), "ring"])
    case = Case(kind, "", (numel,), dtype, op, rng.randrange(9), seed, "plain", False, 0, False)
    if random.random() < 0.05:
        time.sleep(random.random() * 0.003)  # ranks come at different times
    if kind != "ring":
        check(case, call(group, case), group.rank, group.size)
        return
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sent = group.send(given_to(case, group.rank, group.size), after, seed)
    got = torch.empty(numel, dtype=DTYPES[dtype])
    group.recv(got, before, seed).wait()
    sent.wait()
    assert torch.equal(got, given_to(case, before, group.size))


def test_random_collectives_are_right() -> None:
    count = few_or_all(120, 1000)

    def body(group: Group) -> None:
        torch.set_num_threads(1)
        for seed in range(count):
            _one(group, seed)

    with shm_world(3, body) as world:
        assert [world.answer(rank) for rank in range(3)] == [None] * 3


@pytest.mark.parametrize("attempt", range(KILLS))
def test_a_rank_that_is_killed_is_reported_by_the_others(attempt: int) -> None:
    rng = random.Random(attempt)
    victim = rng.randrange(3)
    numel = rng.choice([1, 1_000, 1_000_000])

    def body(group: Group) -> Any:
        torch.set_num_threads(1)
        data = torch.ones(numel)
        try:
            while True:
                group.all_reduce(data, Op.MAX).wait()
        except Exception as error:
            return type(error).__name__, str(error)

    with shm_world(3, body) as world:
        _wait_for_moment(rng.random() * 0.05)
        os.kill(world.processes[victim].pid or 0, signal.SIGKILL)
        for rank in {0, 1, 2} - {victim}:
            name, message = world.answer(rank)
            assert name == "PeerLost" and f"lost rank {victim}" in message, message
            assert "(killed by signal 9 (SIGKILL); its last operation: " in message, message


@pytest.mark.parametrize("status", [0, 3])
def test_a_rank_that_exits_is_reported_with_its_status(status: int) -> None:
    def body(group: Group) -> tuple[str, int | None]:
        if group.rank == 1:
            os._exit(status)
        try:
            group.all_reduce(torch.zeros(2)).wait()
        except PeerLost as error:
            return str(error), error.exit_status
        return "nothing was raised", None

    with shm_world(2, body) as world:
        message, told = world.answer(0)
        assert told == status and f"(exit status {status}; its last operation: none" in message


def test_a_rank_that_closes_the_group_and_lives_on_is_reported() -> None:
    def body(group: Group) -> str:
        if group.rank == 1:
            group.close()
            signal.pause()
        return loss_in(lambda: group.all_reduce(torch.zeros(2)))

    with shm_world(2, body) as world:
        assert "lost rank 1 in all_reduce #1" in (told := world.answer(0))
        assert "(it has left the group; its last operation: none yet)" in told


def _wait_for_moment(delay_s: float) -> None:
    """Let the collectives run for a while: the moment of the kill is what is tested."""
    time.sleep(delay_s)


def test_a_rank_that_waits_for_a_message_of_a_killed_rank_raises_peer_lost() -> None:
    def body(group: Group) -> str:
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_in(lambda: group.recv(torch.empty(4), 1, tag=3))

    with shm_world(2, body) as world:
        assert "lost rank 1 in recv from 1, tag 3" in world.answer(0)


def test_operations_before_a_failure_are_written_to_the_run_directory(tmp_path: Path) -> None:
    def body(group: Group) -> str:
        memory_of(group).segment.run_dir = RunDir(tmp_path)
        group.broadcast(torch.zeros(3)).wait()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_in(lambda: group.all_reduce(torch.zeros(2)))

    with shm_world(2, body) as world:
        world.answer(0)
    text = RunDir(tmp_path).operations(0).read_text()
    assert "broadcast #1 of 3 float32 root 0" in text and "not ended" in text


def test_memory_of_another_group_is_refused() -> None:
    from shoal.transport.shm import _shm

    fd = _shm.create(2, 4096, 8192, 1234)
    try:
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        for size, generation in ((2, 1235), (3, 1234)):
            with pytest.raises(ValueError, match="not the shared memory"):
                _shm.attach(fd, 0, size, generation)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 100)
    finally:
        os.close(fd)
