"""The log: what was answered is on the disk; what was cut off, is damaged or does not fit."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from shoal.coordinator import Answer, Failed, Grant, List, Listing, PutIf
from shoal.coordinator.log import HEADER_BYTES, StoreLog, frame
from shoal.coordinator.service import Core
from shoal.coordinator.store import RequestId
from shoal.errors import BadInput


def opened(path: Path, growth_bytes: int = 1 << 20) -> Core:
    log = StoreLog(path, growth_bytes)
    return Core(log.store, log)


def put(core: Core, key: str, value: bytes, version: int = 0, number: int = 1) -> Answer:
    return core.answer(PutIf(key, value, version), RequestId(1, number))


def value_of(core: Core, key: str) -> bytes | None:
    found = core.answer(List(key))
    assert isinstance(found, Listing)
    return found.entries[key].value if key in found.entries else None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "coordinator.log"


def test_a_log_that_was_cut_off_anywhere_keeps_what_was_complete(
    path: Path, whole_suite: bool
) -> None:
    core = opened(path)
    put(core, "a", b"first", number=1)
    complete = path.stat().st_size
    put(core, "b", b"second", number=2)
    core.close()
    data = path.read_bytes()
    for end in range(complete, len(data), 1 if whole_suite else 9):
        path.write_bytes(data[:end])
        core = opened(path)
        assert (value_of(core, "a"), value_of(core, "b")) == (b"first", None)
        assert path.stat().st_size == complete
        assert isinstance(put(core, "c", b"third", number=3), int)
        core.close()
        core = opened(path)
        assert value_of(core, "c") == b"third"
        core.close()


@pytest.mark.parametrize("rest", [bytes(100), b"\xff" * 100, b"\x05\x00\x00\x00garbage"])
def test_what_follows_the_last_record_and_is_none_is_cut_away(path: Path, rest: bytes) -> None:
    core = opened(path)
    put(core, "a", b"first")
    core.close()
    with path.open("ab") as file:
        file.write(rest)
    core = opened(path)
    assert value_of(core, "a") == b"first"
    core.close()


def test_a_log_that_is_damaged_before_its_last_record_is_refused(path: Path) -> None:
    """Going on without a record that was answered would give its revision out twice."""
    core = opened(path)
    for number in range(3):
        put(core, f"key{number}", b"value", number=number)
    core.close()
    data = path.read_bytes()
    last = data.rindex(b"key2") - 60
    chance = random.Random(0)
    for _ in range(40):
        damaged = bytearray(data)
        damaged[chance.randrange(last)] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match="is damaged"):
            StoreLog(path)
    path.write_bytes(data)
    opened(path).close()


def test_a_value_that_looks_like_a_record_is_none(path: Path) -> None:
    core = opened(path)
    put(core, "a", b"first")
    core.close()
    inside = path.read_bytes()[HEADER_BYTES:]
    core = opened(path)
    before = path.stat().st_size
    put(core, "b", frame(core._store.image(), 12345) + inside[:10], number=2)
    core.close()
    path.write_bytes(path.read_bytes()[:-1])
    core = opened(path)
    assert path.stat().st_size == before
    core.close()


@pytest.mark.parametrize("content", [b"", b"SHOALCRD", bytes(200), b"#!/bin/sh\n" * 30])
def test_a_file_that_is_no_log_is_refused_and_stays(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(BadInput, match="is damaged"):
        StoreLog(path)
    assert path.read_bytes() == content


def test_two_coordinators_do_not_share_a_log(path: Path) -> None:
    core = opened(path)
    with pytest.raises(BadInput, match="another coordinator uses"):
        StoreLog(path)
    core.close()
    opened(path).close()


def test_a_log_that_grows_is_replaced_by_an_image(path: Path) -> None:
    core = opened(path, growth_bytes=500)
    version = 0
    for number in range(100):
        written = put(core, "a", b"%d" % number, version, number)
        assert isinstance(written, int)
        version = written
        assert path.stat().st_size < 1500
    core.close()
    core = opened(path)
    assert value_of(core, "a") == b"99"
    assert put(core, "a", b"99", version - 1, 99) == version  # the same request again
    assert put(core, "a", b"100", version, 100) == version + 1
    core.close()
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "coordinator.lock",
        "coordinator.log",
    ]


class Failing:
    """A system call that fails while `is_failing`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, after: int = 0):
        self.is_failing = False
        self._after = after
        self._real: Any = getattr(os, name)
        monkeypatch.setattr(f"shoal.coordinator.log.os.{name}", self)

    def __call__(self, *args: Any) -> Any:
        if self.is_failing:
            if self._after:
                self._real(args[0], args[1][: self._after], *args[2:])
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._real(*args)


@pytest.mark.parametrize(("name", "after"), [("pwrite", 0), ("pwrite", 5), ("fsync", 0)])
def test_a_disk_that_is_full_refuses_the_request_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: int
) -> None:
    core = opened(path)
    put(core, "a", b"first")
    size = path.stat().st_size
    failing = Failing(monkeypatch, name, after)
    failing.is_failing = True
    refused = put(core, "b", b"second", number=2)
    assert isinstance(refused, Failed) and "No space left on device" in refused.reason
    assert (value_of(core, "a"), value_of(core, "b")) == (b"first", None)
    assert path.stat().st_size == size
    failing.is_failing = False
    assert put(core, "c", b"third", number=3) == 2
    core.close()
    core = opened(path)
    assert (value_of(core, "b"), value_of(core, "c")) == (None, b"third")
    core.close()


def test_an_image_that_cannot_be_written_leaves_the_log_as_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    core = opened(path, growth_bytes=100)
    failing = Failing(monkeypatch, "rename")
    failing.is_failing = True
    for number in range(8):
        assert isinstance(put(core, f"k{number}", bytes(50), number=number), int)
    failing.is_failing = False
    core.close()
    core = opened(path)
    assert value_of(core, "k7") == bytes(50)
    core.close()
    assert "cannot be compacted: No space left on device; it grows" in capsys.readouterr().err


def test_leases_that_end_while_the_disk_is_full_end_when_it_is_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    log = StoreLog(path)
    core = Core(log.store, log, lambda: now[0])
    core.answer(PutIf("a", b"", 0), RequestId(1, 1))
    core.answer(Grant(1.0, "x"), RequestId(1, 2))
    core.answer(PutIf("alive", b"", 0, 1), RequestId(1, 3))
    failing = Failing(monkeypatch, "fsync")
    failing.is_failing = True
    now[0] = 5.0
    core.tick()
    assert value_of(core, "alive") == b""
    failing.is_failing = False
    core.tick()
    assert value_of(core, "alive") is None
    core.close()
