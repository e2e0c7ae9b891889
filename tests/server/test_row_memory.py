"""Memory for pulled rows: when it is used again, and what a server accepts."""

from __future__ import annotations

import os

import pytest
import torch

from shoal.protocol.frames import Refused
from shoal.server.rows.memory import RowMemories, attach
from shoal.transport.shm import memfd


def test_memory_is_used_again_once_no_tensor_refers_to_it() -> None:
    shared: list[int] = []
    memories = RowMemories(lambda number, descriptor: shared.append(number))
    with memories.take(4, 2) as first:
        kept = first.rows[1:2]
    with memories.take(4, 2) as second:
        pass
    assert (first.memory, second.memory) == (0, 1) and shared == [0, 1]
    del first, second
    with memories.take(4, 2) as third:
        assert third.memory == 1, "a slice still refers to the first"
    del kept, third
    with memories.take(4, 2) as fourth:
        assert fourth.memory == 0 and shared == [0, 1]


def test_rows_are_private_while_all_memory_is_in_use_or_servers_are_elsewhere() -> None:
    memories = RowMemories(lambda number, descriptor: None)
    taken = []
    for _ in range(9):
        with memories.take(4, 2) as pulled:
            taken.append(pulled)
    assert [pulled.memory for pulled in taken] == [*range(8), None]
    memories = RowMemories(None)
    with memories.take(4, 2) as pulled:
        assert pulled.memory is None and pulled.rows.shape == (4, 2)
    address = pulled.rows.data_ptr()
    with memories.take(4, 2) as other:
        assert other.rows.data_ptr() != address
    del pulled
    with memories.take(3, 2) as again:
        assert again.rows.data_ptr() == address


def test_memory_of_a_pull_that_failed_is_not_used_again() -> None:
    memories = RowMemories(lambda number, descriptor: None)
    with pytest.raises(ZeroDivisionError), memories.take(4, 2):
        raise ZeroDivisionError
    with memories.take(4, 2) as pulled:
        assert pulled.memory == 1


def test_a_larger_pull_gets_larger_memory_that_servers_see() -> None:
    seen: dict[int, torch.Tensor] = {}

    def share(number: int, descriptor: int) -> None:
        seen[number] = torch.from_numpy(attach(descriptor))

    memories = RowMemories(share)
    with memories.take(4, 2):
        pass
    with memories.take(1 << 18, 2) as pulled:
        assert pulled.memory is not None
        seen[pulled.memory][3] = 7.0
    assert pulled.rows[1, 1] == 7.0


def test_memory_that_could_shrink_is_refused() -> None:
    descriptor = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    with pytest.raises(Refused, match="sealed"):
        attach(descriptor)
    os.close(descriptor)
    descriptor = memfd.make("odd", 100)
    with pytest.raises(Refused, match="sealed"):
        attach(descriptor)
    os.close(descriptor)
