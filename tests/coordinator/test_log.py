"""The log: what was answered is on the disk; what was cut off, is damaged or does not fit."""

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

from shoal.coordinator import Answer, Failed, Grant, List, Listing, PutIf
from shoal.coordinator.log import HEADER_BYTES, StoreLog, frame
from shoal.coordinator.service import Core
from shoal.coordinator.store import RequestId
from shoal.errors import BadInput

NUMBERS = itertools.count(1)


@contextmanager
def opened(path: Path, growth_bytes: int = 1 << 20) -> Iterator[Core]:
    log = StoreLog(path, growth_bytes)
    with closing(Core(log.store, log)) as core:
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
    return tmp_path / "coordinator.log"


def test_a_log_that_was_cut_off_anywhere_keeps_what_was_complete(
    path: Path, whole_suite: bool
) -> None:
    data = written(path, a=b"first", b=b"second")
    path.unlink()
    complete = len(written(path, a=b"first"))
    for end in range(complete, len(data), 1 if whole_suite else 9):
        path.write_bytes(data[:end])
        assert kept(path, "a", "b") == [b"first", None]
        assert path.stat().st_size == complete
        written(path, c=b"third")
        assert kept(path, "a", "c") == [b"first", b"third"]


@pytest.mark.parametrize("rest", [bytes(100), b"\xff" * 100, b"\x05\x00\x00\x00garbage"])
def test_what_follows_the_last_record_and_is_none_is_cut_away(path: Path, rest: bytes) -> None:
    path.write_bytes(written(path, a=b"first") + rest)
    assert kept(path, "a") == [b"first"]


@pytest.mark.parametrize("rest", [bytes(8 << 20), b"\x01\x00\x10\x00" * (2 << 20)])
def test_more_than_a_cut_off_record_after_the_last_is_refused(path: Path, rest: bytes) -> None:
    path.write_bytes(data := written(path, a=b"first") + rest)
    with pytest.raises(BadInput, match="is damaged: no records, but 8388608 other bytes"):
        StoreLog(path)
    assert path.read_bytes() == data


def test_a_log_that_is_damaged_before_its_last_record_is_refused(path: Path) -> None:
    """Going on without a record that was answered would give its revision out twice."""
    data = written(path, key0=b"value", key1=b"value", key2=b"value")
    last = data.rindex(b"key2") - 60
    chance = random.Random(0)
    for _ in range(40):
        damaged = bytearray(data)
        damaged[chance.randrange(last)] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match="is damaged"):
            StoreLog(path)
    path.write_bytes(data)
    assert kept(path, "key2") == [b"value"]


def test_a_value_that_looks_like_a_record_is_none(path: Path) -> None:
    before = written(path, a=b"first")
    with opened(path) as core:
        image = frame(core._store.image(), 12345)
    path.write_bytes(written(path, b=image + before[HEADER_BYTES:][:10])[:-1])
    assert kept(path, "a", "b") == [b"first", None]
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"SHOALCRD", bytes(200), b"#!/bin/sh\n" * 30])
def test_a_file_that_is_no_log_is_refused_and_stays(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(BadInput, match="is damaged"):
        StoreLog(path)
    assert path.read_bytes() == content


def test_two_coordinators_do_not_share_a_log(path: Path) -> None:
    with opened(path), pytest.raises(BadInput, match="another coordinator uses"):
        StoreLog(path)
    assert kept(path) == []


def test_a_log_that_grows_is_replaced_by_an_image(path: Path) -> None:
    version: Any = 0
    with opened(path, growth_bytes=500) as core:
        for number in range(100):
            version = put(core, "a", b"%d" % number, version, number)
            assert path.stat().st_size < 1500
    with opened(path) as core:
        assert value_of(core, "a") == b"99"
        assert put(core, "a", b"99", version - 1, 99) == version  # the same request again
        assert put(core, "a", b"100", version, 100) == version + 1
    assert {file.name for file in path.parent.iterdir()} == {"coordinator.lock", "coordinator.log"}


Failing = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """In such a block a system call fails, after it has written so many bytes."""

    @contextmanager
    def block(name: str, after: int = 0) -> Iterator[None]:
        real: Any = getattr(os, name)

        def fail(*args: Any) -> None:
            if after:
                real(args[0], args[1][:after], *args[2:])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(f"shoal.coordinator.log.os.{name}", fail)
            yield

    return block


@pytest.mark.parametrize(("name", "after"), [("pwrite", 0), ("pwrite", 5), ("fsync", 0)])
def test_a_disk_that_is_full_refuses_the_request_and_nothing_else(
    path: Path, failing: Failing, name: str, after: int
) -> None:
    with opened(path) as core:
        put(core, "a", b"first")
        size = path.stat().st_size
        with failing(name, after):
            refused = put(core, "b", b"second", number=2)
            assert isinstance(refused, Failed) and "No space left on device" in refused.reason
            assert (value_of(core, "a"), value_of(core, "b")) == (b"first", None)
            assert path.stat().st_size == size
        assert put(core, "c", b"third", number=3) == 2
    assert kept(path, "b", "c") == [None, b"third"]


def test_an_image_that_cannot_be_written_leaves_the_log_as_it_is(
    path: Path, failing: Failing, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(path, growth_bytes=100) as core, failing("rename"):
        for number in range(8):
            assert isinstance(put(core, f"k{number}", bytes(50), number=number), int)
    assert kept(path, "k7") == [bytes(50)]
    assert "cannot be compacted: No space left on device; it grows" in capsys.readouterr().err


def test_leases_that_end_while_the_disk_is_full_end_when_it_is_not(
    path: Path, failing: Failing
) -> None:
    now = [0.0]
    log = StoreLog(path)
    with closing(Core(log.store, log, lambda: now[0])) as core:
        core.answer(Grant(1.0, "x"), RequestId(1, 2))
        core.answer(PutIf("alive", b"", 0, 1), RequestId(1, 3))
        now[0] = 5.0
        with failing("fsync"):
            core.tick()
            assert value_of(core, "alive") == b""
        core.tick()
        assert value_of(core, "alive") is None
