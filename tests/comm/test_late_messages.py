"""Messages that are not taken in time, and waits that other traffic keeps waking up."""

from __future__ import annotations

import threading

import pytest
import torch

from shoal.comm.group import Group
from shoal.errors import PeerLost
from shoal.transport.shm.messages import ShmTransport
from shoal.transport.shm.segment import is_built
from tests.comm.shm import memory_of, on_shm_threads

pytestmark = pytest.mark.skipif(not is_built(), reason="built without a compiler")
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
