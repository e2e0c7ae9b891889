"""The bytes of a log: a header, then records with a length and a CRC each.

    magic, version, salt | length, crc, msgpack | length, crc, msgpack | …

The first record is an image of the whole store. The salt, random for each file, goes into every
CRC: bytes of a value, or of an older file, are not taken for a record.
"""

from __future__ import annotations

import secrets
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from shoal.coordinator.records import LogItem, Record, StoreImage

_MAGIC = b"SHOALCRD"
_VERSION = 1
_HEADER = struct.Struct("<8sII")  # magic, version, salt
_FRAME = struct.Struct("<II")  # length, crc
HEADER_BYTES = _HEADER.size
MAX_RECORD_BYTES = 64 << 20

_items: msgspec.msgpack.Decoder[LogItem] = msgspec.msgpack.Decoder(LogItem)


class DamagedLog(Exception):
    """Bytes that a write which was cut off does not explain."""


class ReadLog(NamedTuple):
    salt: int
    image: StoreImage
    records: list[Record]
    good_bytes: int  # what follows is the rest of a write that was cut off


def new_salt() -> int:
    return secrets.randbits(32)


def header(salt: int) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, salt)


def frame(item: LogItem, salt: int) -> bytes:
    data = msgspec.msgpack.encode(item)
    return _FRAME.pack(len(data), zlib.crc32(data, salt)) + data


def read(data: bytes) -> ReadLog:
    """All records up to the first one that is not whole; DamagedLog if one follows that is."""
    salt = _salt_of(data)
    items = list(_whole_items(data, salt))
    end = items[-1][1] if items else HEADER_BYTES
    if not items or not isinstance(items[0][0], StoreImage):
        raise DamagedLog("it does not begin with an image of the store")
    records = [item for item, _ in items[1:] if isinstance(item, Record)]
    if len(records) != len(items) - 1:
        raise DamagedLog("it has an image of the store in its middle")
    if _has_record_after(data, end, salt):
        raise DamagedLog(f"the record at byte {end} is damaged, and others follow it")
    return ReadLog(salt, items[0][0], records, end)


def _salt_of(data: bytes) -> int:
    if len(data) < HEADER_BYTES:
        raise DamagedLog("it is shorter than its header")
    magic, version, salt = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise DamagedLog("it is not the log of a coordinator of this version")
    return int(salt)


def _whole_items(data: bytes, salt: int) -> Iterator[tuple[LogItem, int]]:
    """Items and where each ends."""
    offset = HEADER_BYTES
    while (end := _end_of_frame(data, offset, salt)) is not None:
        try:
            yield _items.decode(memoryview(data)[offset + _FRAME.size : end]), end
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DamagedLog(f"the record at byte {offset} cannot be read: {error}") from error
        offset = end


def _end_of_frame(data: bytes, offset: int, salt: int) -> int | None:
    if offset + _FRAME.size > len(data):
        return None
    length, check = _FRAME.unpack_from(data, offset)
    begin = offset + _FRAME.size
    if not 0 < length <= min(MAX_RECORD_BYTES, len(data) - begin):
        return None
    is_whole = zlib.crc32(memoryview(data)[begin : begin + length], salt) == check
    return begin + length if is_whole else None


def _has_record_after(data: bytes, offset: int, salt: int) -> bool:
    """A write that was cut off is the last one: no whole record comes after it."""
    return any(
        _end_of_frame(data, later, salt) is not None for later in range(offset + 1, len(data))
    )
