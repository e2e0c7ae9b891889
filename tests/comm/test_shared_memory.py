from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.comm.executors.shared_memory import LightWork
from shoal.comm.group import Group, Op
from shoal.comm.transport.shm.messages import ShmTransport
from shoal.comm.transport.shm.segment import is_built
from shoal.comm.work_queue import WorkQueue
from shoal.errors import Desync, PeerLost, ShoalError
from shoal.schedules.collectives.catalog import algorithms, kinds
from tests.comm.cases import call, cases, check
from tests.comm.threads import memory_of, on_shm_threads

pytestmark = pytest.mark.skipif(not is_built(), reason="built without a compiler")
if is_built():
    from shoal.comm.transport.shm import _shm


@pytest.mark.parametrize("kind", kinds())
@settings(max_examples=10, derandomize=True, database=None)
@given(data=st.data())
def test_every_collective_gives_the_right_numbers(kind: str, data: st.DataObject) -> None:
    case = data.draw(cases(kind, algorithms(kind)[0]))
    direct_bytes = data.draw(st.sampled_from([0, 100, 16384]))

    def work(group: Group) -> torch.Tensor:
        _shm.tune(memory_of(group).segment.handle, direct_bytes, -1)  # looks as often as ever
        return call(group, case)

    for size in (1, 2, 3, 5):
        for rank, got in enumerate(on_shm_threads(size, work)):
            check(case, got, rank, size)


def test_a_message_passes_a_collective_that_is_begun() -> None:
    def work(group: Group) -> float:
        data = torch.ones(1)
        note = torch.zeros(200_000)
        if group.rank == 0:
            under_way = group.all_reduce(data)
            group.send(note + 5, 1).wait()
            under_way.wait()
        else:
            group.recv(note, 0).wait()
            group.all_reduce(data).wait()
        return float(data + note[-1])

    assert on_shm_threads(2, work) == [2.0, 7.0]


def test_light_sums_and_what_follows_them_end_in_the_order_of_the_calls() -> None:
    """The first one is begun beside the queue, which takes it over when it is asked for more."""

    def work(group: Group) -> tuple[list[int], list[float]]:
        first, second, root = torch.ones(1), torch.ones(3), torch.full((1,), float(group.rank))
        works: list[Any] = [group.all_reduce(first), group.all_reduce(second)]
        assert [isinstance(each, LightWork) for each in works] == [True, False]
        works.append(group.broadcast(root, 1))
        ended: list[int] = []
        for number, each in enumerate(works):
            each.when_done(partial(ended.append, number))
        for each in reversed(works):
            each.wait()
        return ended, [float(first), float(second.sum()), float(root)]

    assert on_shm_threads(2, work) == [([0, 1, 2], [2.0, 6.0, 1.0])] * 2


def test_light_sums_that_nobody_waits_for_and_those_that_other_threads_wait_for() -> None:
    def work(group: Group) -> list[float]:
        dropped, waited, called = (torch.ones(1) for _ in range(3))
        group.all_reduce(dropped)
        other = threading.Thread(target=group.all_reduce(waited).wait)
        other.start()
        other.join()
        done = threading.Event()
        group.all_reduce(called).when_done(done.set)  # type: ignore[attr-defined]
        assert done.wait(60)
        return [float(dropped), float(waited), float(called)]

    assert on_shm_threads(2, work) == [[2.0, 2.0, 2.0]] * 2


def test_a_group_that_has_had_light_sums_is_freed() -> None:
    queues: list[weakref.ref[WorkQueue]] = []

    def work(group: Group) -> None:
        group.all_reduce(torch.ones(1)).wait()
        group.all_reduce(torch.ones(1))
        queues.append(weakref.ref(memory_of(group).queue))

    on_shm_threads(2, work)
    gc.collect()
    assert [ref() for ref in queues] == [None, None]


def test_a_message_of_another_size_is_refused() -> None:
    def work(group: Group) -> None:
        if group.rank == 0:
            group.send(torch.zeros(3), 1).wait()
        else:
            received = group.recv(torch.zeros(2), 0)
            for ask in (received.poll, received.wait, received.wait):
                with pytest.raises(ShoalError, match=r"expected 8 bytes from rank 0.*got 12"):
                    while not ask():
                        pass

    on_shm_threads(2, work)


def test_the_mean_of_8_bit_integers_over_128_ranks() -> None:
    """128 does not fit the type, neither as sum nor as divisor."""

    def work(group: Group) -> list[int]:
        data = torch.tensor([1, -1, 100], dtype=torch.int8)
        group.all_reduce(data, Op.MEAN).wait()
        return data.tolist()

    assert on_shm_threads(128, work) == [[1, -1, 100]] * 128


@pytest.mark.parametrize(
    ("mine", "theirs", "sentence"),
    [
        (lambda g: g.all_reduce(torch.zeros(4)), lambda g: g.broadcast(torch.zeros(4)),
         "all_reduce #1 of 4 float32 sum"),
        (lambda g: g.all_reduce(torch.zeros(4)), lambda g: g.all_reduce(torch.zeros(5)),
         "of 5 float32"),
        (lambda g: g.all_reduce(torch.zeros(4)), lambda g: g.all_reduce(torch.zeros(4).int()),
         "of 4 int32"),
        (lambda g: g.all_reduce(torch.zeros(9999)),
         lambda g: g.all_reduce(torch.zeros(9999), Op.MAX),
         "of 9,999 float32 max"),
    ],
)  # fmt: skip
def test_different_calls_are_reported_with_both_ranks(
    mine: Callable[[Group], Any], theirs: Callable[[Group], Any], sentence: str
) -> None:
    told: list[str] = []

    def work(group: Group) -> None:
        try:
            (mine if group.rank == 0 else theirs)(group).wait()
            group.barrier().wait()
        except Desync as error:
            told.append(str(error))
            raise

    with pytest.raises(Desync, match=r"rank \d called .* while rank \d called"):
        on_shm_threads(2, work)
    assert len(set(told)) == 1 and len(told) == 2 and sentence in told[0]


# ------------------------------------------------------------------ messages that are late

LARGE = 1 << 20  # more than a ring holds


def test_after_a_send_that_timed_out_half_way_nothing_is_received_in_its_place() -> None:
    timed_out = threading.Event()

    def work(group: Group) -> None:
        transport = memory_of(group).transport
        if group.rank == 0:
            half_sent = transport.send(torch.zeros(LARGE), 1, 7)
            with pytest.raises(PeerLost, match="rank 0 lost rank 1"):
                half_sent.wait(0.01)
            with pytest.raises(PeerLost, match="rank 0 lost rank 1"):
                transport.send(torch.ones(LARGE), 1, 7).wait()
            timed_out.set()
        else:
            timed_out.wait(60)
            with pytest.raises(PeerLost, match="rank 1 lost rank"):
                transport.recv(torch.empty(LARGE), 0, 7).wait()
        raise _Over

    with pytest.raises(_Over):
        on_shm_threads(2, work)


class _Over(Exception):
    """The group is broken: its last barrier is left out."""


def test_a_deadline_is_noticed_while_other_messages_keep_arriving() -> None:
    over = threading.Event()

    def flood(transport: ShmTransport) -> None:
        for _ in range(500_000):
            if over.is_set():
                break
            transport.send(torch.ones(1), 0, 2).wait()
        transport.send(torch.zeros(1), 0, 2).wait()

    def drain(transport: ShmTransport) -> None:
        number = torch.ones(1)
        while number:
            transport.recv(number, 1, 2).wait()

    def work(group: Group) -> None:
        transport = memory_of(group).transport
        if group.rank == 1:
            flood(transport)
            return
        drainer = threading.Thread(target=drain, args=(transport,))
        drainer.start()
        with pytest.raises(PeerLost, match="recv from 1"):
            transport.recv(torch.empty(1), 1, 1).wait(0.3)
        assert drainer.is_alive(), "it was noticed only after the last message"
        over.set()
        drainer.join()

    on_shm_threads(2, work)
