"""The store of a coordinator on the disk: each change is there before its request is answered.

    magic, version, crc | msgpack of the store

A change writes the whole store, which is small: temporary file, fsync, rename, fsync of the folder.
Whenever the process is killed there is the store from before the change, or the one after it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from shoal.errors import BadInput
from shoal.runtime.checkpoint_folders import sync_path
from shoal.runtime.decoders import decode_msgpack
from shoal.runtime.files import locked, read_bounded
from shoal.server.coordinator.store import Store

_MAX_BYTES = 64 << 20
_HEADER = struct.Struct("<8sII")  # magic, version, crc


class OutcomeUnknown(OSError):
    """The change may be on the disk or not: its request has no known outcome."""


class StoreFile:
    """Open for one process at a time."""

    def __init__(self, path: Path):
        """BadInput where it is damaged, in use, or cannot be written."""
        self._path = path
        with ExitStack() as lock:
            try:
                lock.enter_context(locked(path.with_suffix(".lock"), flags=fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise BadInput(f"another coordinator uses {path}") from error
            except OSError as error:
                why = f"the coordinator's store {path} cannot be written: {error.strerror}"
                raise BadInput(why) from error
            self.store = _read(path) if path.exists() else Store()
            self._lock = lock.pop_all()

    def close(self) -> None:
        self._lock.close()

    def write(self, store: Store) -> None:
        """Returns when it is on the disk; an OSError: it is not there."""
        packed = msgspec.msgpack.encode(store)
        unfinished = self._path.with_suffix(".part")
        try:
            _write_durably(unfinished, _header(packed) + packed)
            os.rename(unfinished, self._path)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise
        try:
            sync_path(self._path.parent)
        except OSError as error:
            raise OutcomeUnknown(error.errno, error.strerror) from error


def _header(packed: bytes) -> bytes:
    return _HEADER.pack(b"SHOALCRD", 3, zlib.crc32(packed))


def _read(path: Path) -> Store:
    data = read_bounded(path, _MAX_BYTES)
    packed = data[_HEADER.size :]
    try:
        if data[: _HEADER.size] != _header(packed):
            raise ValueError("it is none of this version, or has changed")
        return decode_msgpack(packed, Store)
    except ValueError as error:
        raise BadInput(f"the coordinator's store {path} is damaged: {error}") from error


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
