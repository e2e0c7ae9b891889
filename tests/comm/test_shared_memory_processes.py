"""What only processes show: random work, sudden death, and what is left of it."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.group import Group, Op
from shoal.comm.select import exchange_over
from shoal.comm.transport.shm.segment import is_built, join
from shoal.comm.transport.transport import Work
from shoal.errors import PeerLost
from shoal.runtime.run_dir import RunDir
from shoal.schedules.collectives.catalog import kinds
from tests.comm.cases import DTYPES, Case, call, check, given_to
from tests.comm.threads import memory_of
from tests.comm.torch_ranks import forked_ranks
from tests.products import few_or_all

pytestmark = pytest.mark.skipif(not is_built(), reason="built without a compiler")
KILLS = int(os.environ.get("SHOAL_TEST_KILLS", "6"))


def on_shm_processes(size: int, body: Callable[[Group], Any]) -> list[Any]:
    """What `body` gives in processes that are one group, by rank; None of one that is killed."""
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:

        def main(rank: int) -> Any:
            store = dist.FileStore(f"{folder}/store", size)
            segment = join(exchange_over(store, rank, size), rank, size, 30.0)
            assert segment is not None
            group = Group(SharedMemory(segment))
            found = body(group)
            group.close()
            return found

        found = forked_ranks(main, size, 300.0)
    assert set(os.listdir("/dev/shm")) == before
    return found


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
        for seed in range(count):
            _one(group, seed)

    assert on_shm_processes(3, body) == [None] * 3


@pytest.mark.parametrize("attempt", range(KILLS))
def test_a_rank_that_is_killed_is_reported_by_the_others(attempt: int) -> None:
    rng = random.Random(attempt)
    victim = rng.randrange(3)
    numel = rng.choice([1, 1_000, 1_000_000])

    delay_s = rng.random() * 0.05  # the moment of the kill is what is tested

    def body(group: Group) -> str:
        data = torch.ones(numel)
        if group.rank == victim:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with pytest.raises(PeerLost) as raised:
            while True:
                group.all_reduce(data, Op.MAX).wait()
        return str(raised.value)

    found = on_shm_processes(3, body)
    assert found.pop(victim) is None
    for message in found:
        assert f"lost rank {victim}" in message
        assert "(killed by signal 9 (SIGKILL); its last operation: " in message, message


def all_reduce(group: Group) -> Work:
    return group.all_reduce(torch.zeros(2))


def receive(group: Group) -> Work:
    return group.recv(torch.empty(4), 1, tag=3)


def exits(status: int) -> Callable[[Group], None]:
    return lambda group: os._exit(status)


def is_killed(group: Group) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


OVER = multiprocessing.get_context("fork").Event()


def closes(group: Group) -> None:
    group.close()
    OVER.wait(60)


@pytest.mark.parametrize(
    ("leave", "call", "said"),
    [
        (exits(0), all_reduce, r"all_reduce #1 .*\(exit status 0; its last operation: none yet"),
        (exits(3), all_reduce, r"all_reduce #1 .*\(exit status 3; its last operation: none yet"),
        (closes, all_reduce, r"all_reduce #1 .*\(it has left the group; its last operation: none"),
        (is_killed, receive, r"recv from 1, tag 3"),
    ],
)
def test_a_rank_that_leaves_is_reported_with_its_end(
    leave: Callable[[Group], None], call: Callable[[Group], Work], said: str
) -> None:
    def body(group: Group) -> str:
        if group.rank == 1:
            leave(group)
            return ""
        told = loss_in(lambda: call(group))
        OVER.set()
        return told

    OVER.clear()
    assert re.search(f"lost rank 1 in {said}", on_shm_processes(2, body)[0])


SENT = multiprocessing.get_context("fork").Event()
GAVE_UP = multiprocessing.get_context("fork").Event()


def test_who_gives_up_a_message_to_a_lost_rank_tells_the_others_of_the_loss() -> None:
    """Not of a timeout, which elastic runs do not survive; a part of it had been written."""

    def body(group: Group) -> str:
        if group.rank == 2:
            SENT.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)
        if group.rank == 1:
            send = group.send(torch.zeros(1_000_000), 2, tag=1)
            SENT.set()
            told = loss_in(lambda: send)
            GAVE_UP.set()
            OVER.wait(60)
            return told
        GAVE_UP.wait(60)
        told = loss_in(group.barrier)
        OVER.set()
        return told

    for event in (SENT, GAVE_UP, OVER):
        event.clear()
    in_barrier, in_send, _ = on_shm_processes(3, body)
    assert "lost rank 2 in send to 2, tag 1 (killed by signal 9" in in_send, in_send
    assert in_barrier.startswith("rank 0 lost rank 2 in no operation (killed by signal 9")


def test_operations_before_a_failure_are_written_to_the_run_directory(tmp_path: Path) -> None:
    def body(group: Group) -> str:
        memory_of(group).segment.run_dir = RunDir(tmp_path)
        group.broadcast(torch.zeros(3)).wait()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_in(lambda: group.all_reduce(torch.zeros(2)))

    on_shm_processes(2, body)
    text = RunDir(tmp_path).operations(0).read_text()
    assert "broadcast #1 of 3 float32 root 0" in text and "not ended" in text


def test_memory_of_another_group_is_refused() -> None:
    from shoal.comm.transport.shm import _shm

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
