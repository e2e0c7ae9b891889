"""The file of the store: what was answered is on the disk; what is damaged or does not fit."""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import BadInput
from shoal.server.coordinator import Answer, Failed, Grant, List, Listing, PutIf
from shoal.server.coordinator.service import Core
from shoal.server.coordinator.store import RequestId
from shoal.server.coordinator.store_file import OutcomeUnknown, StoreFile

NUMBERS = itertools.count(1)


@contextmanager
def opened(path: Path) -> Iterator[Core]:
    with closing(Core(StoreFile(path))) as core:
        yield core


def put(core: Core, key: str, value: bytes, version: int = 0, number: int = 1) -> Answer:
    return core.answer(PutIf(key, value, version), RequestId(1, number))


def value_of(core: Core, key: str) -> bytes | None:
    found = core.answer(List(key))
    assert isinstance(found, Listing)
    return found.entries[key].value if key in found.entries else None


def written(path: Path, **values: bytes) -> bytes:
    """The file after these keys have been put in this order; then the coordinator has ended."""
    with opened(path) as core:
        for key, value in values.items():
            put(core, key, value, number=next(NUMBERS))
    return path.read_bytes()


def kept(path: Path, *keys: str) -> list[bytes | None]:
    with opened(path) as core:
        return [value_of(core, key) for key in keys]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "coordinator.store"


def test_what_was_put_is_there_after_a_restart(path: Path) -> None:
    written(path, a=b"first")
    with opened(path) as core:
        assert value_of(core, "a") == b"first"
        version = put(core, "a", b"second", 1, 7)
        assert version == 2
    with opened(path) as core:
        assert put(core, "a", b"second", 1, 7) == version  # the same request again
        assert put(core, "b", b"third", number=8) == 3
    assert kept(path, "a", "b") == [b"second", b"third"]
    names = {file.name for file in path.parent.iterdir()}
    assert names == {"coordinator.lock", "coordinator.store"}


def test_a_write_that_was_cut_off_by_a_kill_leaves_what_was_complete(path: Path) -> None:
    complete = written(path, a=b"first")
    path.with_suffix(".part").write_bytes(complete[: len(complete) // 2])
    assert kept(path, "a", "b") == [b"first", None]
    written(path, c=b"third")
    assert kept(path, "a", "c") == [b"first", b"third"]


def test_a_store_that_is_damaged_anywhere_is_refused(path: Path) -> None:
    """Going on without a change that was answered would give its revision out twice."""
    data = written(path, key0=b"value", key1=b"value", key2=b"value")
    chance = random.Random(0)
    for _ in range(40):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match="is damaged"):
            StoreFile(path)
    path.write_bytes(data[:-1])
    with pytest.raises(BadInput, match="is damaged"):
        StoreFile(path)
    path.write_bytes(data)
    assert kept(path, "key2") == [b"value"]


@pytest.mark.parametrize("content", [b"", b"SHOALCRD", bytes(200), b"#!/bin/sh\n" * 30])
def test_a_file_that_is_no_store_is_refused_and_stays(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(BadInput, match="is damaged"):
        StoreFile(path)
    assert path.read_bytes() == content


def test_two_coordinators_do_not_share_a_store(path: Path) -> None:
    with opened(path), pytest.raises(BadInput, match="another coordinator uses"):
        StoreFile(path)
    assert kept(path) == []


Failing = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """In such a block a system call fails, after it has succeeded so often."""

    @contextmanager
    def block(name: str, after: int = 0) -> Iterator[None]:
        real: Any = getattr(os, name)
        calls = itertools.count()

        def fail(*args: Any) -> None:
            if next(calls) < after:
                real(*args)
                return
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(f"shoal.server.coordinator.store_file.os.{name}", fail)
            yield

    return block


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_a_disk_that_is_full_refuses_the_request_and_nothing_else(
    path: Path, failing: Failing, name: str
) -> None:
    with opened(path) as core:
        put(core, "a", b"first")
        before = path.read_bytes()
        with failing(name):
            refused = put(core, "b", b"second", number=2)
            assert isinstance(refused, Failed) and "No space left on device" in refused.reason
            assert (value_of(core, "a"), value_of(core, "b")) == (b"first", None)
            assert path.read_bytes() == before
            assert not path.with_suffix(".part").exists()
        assert put(core, "c", b"third", number=3) == 2
    assert kept(path, "b", "c") == [None, b"third"]


def test_where_the_folder_is_not_synced_the_outcome_is_unknown_until_it_is_asked_again(
    path: Path, failing: Failing
) -> None:
    with opened(path) as core:
        with failing("fsync", after=1), pytest.raises(OutcomeUnknown):
            put(core, "a", b"first")
        assert put(core, "a", b"first") == 1
    assert kept(path, "a") == [b"first"]


def test_leases_that_end_while_the_disk_is_full_end_when_it_is_not(
    path: Path, failing: Failing
) -> None:
    now = [0.0]
    with closing(Core(StoreFile(path), lambda: now[0])) as core:
        core.answer(Grant(1.0, "x"), RequestId(1, 2))
        core.answer(PutIf("alive", b"", 0, 1), RequestId(1, 3))
        now[0] = 5.0
        with failing("fsync"):
            core.tick()
            assert value_of(core, "alive") == b""
        core.tick()
        assert value_of(core, "alive") is None
