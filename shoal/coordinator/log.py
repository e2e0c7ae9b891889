"""The log of a coordinator: each record is on the disk before its request is answered.

    magic, version, salt | length, crc, msgpack | length, crc, msgpack | …

The first record is an image of the whole store. The salt, random for each file, goes into every
CRC: bytes of a value, or of an older file, are not taken for a record.

A write that fails leaves the log as it was. One that was cut off by a kill is cut away when the
log is opened. When the log has grown, an image of the store replaces it: temporary file, fsync,
rename, fsync of the folder.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from shoal.coordinator.store import Record, Store, StoreImage
from shoal.errors import BadInput
from shoal.runtime.failpoints import failpoint
from shoal.runtime.files import read_bounded
from shoal.runtime.wording import say

GROWTH_BYTES = 1 << 20  # after so much more, an image replaces the log
_MAX_RECORD_BYTES = 64 << 20
_MAX_CUT_BYTES = 128 << 10  # more than a record of a request has
_MAGIC = b"SHOALCRD"
_VERSION = 2
_HEADER = struct.Struct("<8sII")  # magic, version, salt
_FRAME = struct.Struct("<II")  # length, crc
HEADER_BYTES = _HEADER.size
Image = Callable[[], StoreImage]
_items: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(StoreImage | Record)


class LogBroken(OSError):
    """A record may be in the file or not: its request has no known outcome."""


class StoreLog:
    """Open for one process at a time."""

    def __init__(self, path: Path, growth_bytes: int = GROWTH_BYTES):
        """BadInput where it is damaged, in use, or cannot be written."""
        self._path = path
        self._growth_bytes = growth_bytes
        self._handle = -1
        self._end = 0
        self._compact_at = 0
        self._salt = 0
        self._is_doubtful = False  # what the file holds after `_end` is not known
        self._lock = _locked(path.with_suffix(".lock"))
        try:
            self.store = self._read() if path.exists() else self._begin()
        except OSError as error:
            self.close()
            raise BadInput(f"the coordinator's log {path}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for handle in (self._handle, self._lock):
            if handle >= 0:
                os.close(handle)
        self._handle = self._lock = -1

    def append(self, record: Record, image: Image) -> None:
        """Returns when the record is on the disk. An OSError: it is not there.

        `image` is of the store before the record: it replaces a file that is in doubt.
        """
        if self._is_doubtful:
            self._replace(image())
        data = frame(record, self._salt)
        failpoint("log.append.before")
        try:
            self._write(data)
        except OSError:
            self._cut_off()
            raise
        self._end += len(data)

    def compact_if_due(self, image: Image) -> None:
        """A failure is no harm: the log goes on as it is."""
        if self._end < self._compact_at:
            return
        try:
            self._replace(image())
        except OSError as error:
            self._compact_at = self._end + self._growth_bytes
            why = f"cannot be compacted: {error.strerror}; it grows"
            say(f"the coordinator's log {self._path} {why}")

    # ------------------------------------------------------------------ one record

    def _write(self, data: bytes) -> None:
        half = len(data) // 2
        _write_all(self._handle, data[:half], self._end)
        failpoint("log.append.partial")
        _write_all(self._handle, data[half:], self._end + half)
        failpoint("log.append.written")
        try:
            os.fsync(self._handle)
        except OSError:
            self._is_doubtful = True  # a later fsync that succeeds says nothing about this one
            raise
        failpoint("log.append.synced")

    def _cut_off(self) -> None:
        """Remove what a failed write has left."""
        try:
            os.ftruncate(self._handle, self._end)
        except OSError as error:
            self._is_doubtful = True
            raise LogBroken(error.errno, error.strerror) from error

    # ------------------------------------------------------------------ the whole file

    def _begin(self) -> Store:
        store = Store()
        self._replace(store.image())
        return store

    def _read(self) -> Store:
        try:
            data = read_bounded(self._path, _MAX_RECORD_BYTES + 2 * GROWTH_BYTES)
            store, self._salt, self._end = _stored(data)
        except (
            msgspec.MsgspecError,
            ValueError,
            LookupError,
            AttributeError,
            RuntimeError,
        ) as error:
            raise BadInput(f"the coordinator's log {self._path} is damaged: {error}") from error
        self._handle = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(self._handle, self._end)
        os.fsync(self._handle)
        self._compact_at = self._end + self._growth_bytes
        return store

    def _replace(self, image: StoreImage) -> None:
        """Write the image to a new file, and put that in the place of the log."""
        salt = secrets.randbits(32)
        data = _HEADER.pack(_MAGIC, _VERSION, salt) + frame(image, salt)
        unfinished = self._path.with_suffix(".part")
        failpoint("log.compact.begin")
        handle = _written(unfinished, data)
        try:
            os.rename(unfinished, self._path)
        except OSError:
            os.close(handle)
            raise
        failpoint("log.compact.renamed")
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = handle
        self._salt = salt
        self._end = len(data)
        self._compact_at = self._end + self._growth_bytes
        self._is_doubtful = True  # until its name is on the disk
        _sync_folder(self._path.parent)
        self._is_doubtful = False
        failpoint("log.compact.done")


def frame(item: StoreImage | Record, salt: int) -> bytes:
    data = msgspec.msgpack.encode(item)
    return _FRAME.pack(len(data), zlib.crc32(data, salt)) + data


def _stored(data: bytes) -> tuple[Store, int, int]:
    """The store, the salt, and where the last whole record ends: a write was cut off there.

    ValueError, or what msgspec raises, for bytes that this does not explain.
    """
    if len(data) < HEADER_BYTES:
        raise ValueError("it is shorter than its header")
    magic, version, salt = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise ValueError("it is not the log of a coordinator of this version")
    store: Store | None = None
    at = HEADER_BYTES
    while (end := _end_of_frame(data, at, salt)) is not None:
        item = _items.decode(memoryview(data)[at + _FRAME.size : end])
        if store is None:
            store = Store.of_image(item, 0.0)
        else:
            store.apply(item, 0.0)
        at = end
    if store is None:
        raise ValueError("it does not begin with an image of the store")
    if len(data) - at > _MAX_CUT_BYTES:
        raise ValueError(f"no records, but {len(data) - at} other bytes, follow byte {at}")
    if any(_end_of_frame(data, later, salt) is not None for later in range(at + 1, len(data))):
        raise ValueError(f"the record at byte {at} is damaged, and others follow it")
    return store, salt, at


def _end_of_frame(data: bytes, offset: int, salt: int) -> int | None:
    if offset + _FRAME.size > len(data):
        return None
    length, check = _FRAME.unpack_from(data, offset)
    begin = offset + _FRAME.size
    if not 0 < length <= min(_MAX_RECORD_BYTES, len(data) - begin):
        return None
    is_whole = zlib.crc32(memoryview(data)[begin : begin + length], salt) == check
    return begin + length if is_whole else None


def _written(path: Path, data: bytes) -> int:
    """A new file that is on the disk, open; none is left where it cannot be written."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write_all(handle, data, 0)
        failpoint("log.compact.temporary")
        os.fsync(handle)
        failpoint("log.compact.fsync")
    except OSError:
        os.close(handle)
        with suppress(OSError):
            path.unlink()
        raise
    return handle


def _write_all(handle: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view.nbytes:
        count = os.pwrite(handle, view, offset)
        view = view[count:]
        offset += count


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _locked(path: Path) -> int:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadInput(
            f"the coordinator's log cannot be written: {path}: {error.strerror}"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise BadInput(f"another coordinator uses the log beside {path}") from error
    return handle
