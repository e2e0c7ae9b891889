"""The wire format of protocol buffers, as far as Chakra's messages need it.

A message is a sequence of fields. A field is a key, number << 3 | type, and a value: type 0 is a
varint, 1 and 5 are 8 and 4 bytes, 2 is a length and that many bytes. In a file each message has
its length before it. A varint has 7 bits per byte, the lowest first; the top bit says that more
bytes follow.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.errors import BadInput

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_WIDTH = {FIXED64: 8, FIXED32: 4}
Value = int | bytes


def varint(number: int) -> bytes:
    """An unsigned number of at most 64 bits."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def number_field(field: int, number: int) -> bytes:
    return varint(field << 3 | VARINT) + varint(number)


def bytes_field(field: int, data: bytes) -> bytes:
    return varint(field << 3 | BYTES) + varint(len(data)) + data


def text_field(field: int, text: str) -> bytes:
    return bytes_field(field, text.encode())


def packed_field(field: int, numbers: list[int]) -> bytes:
    """A repeated number; nothing where there is none."""
    return bytes_field(field, b"".join(map(varint, numbers))) if numbers else b""


def with_length(message: bytes) -> bytes:
    return varint(len(message)) + message


def messages(data: bytes, name: str) -> Iterator[bytes]:
    """The messages of a file."""
    position = 0
    while position < len(data):
        length, position = _read_varint(data, position, name)
        if length > len(data) - position:
            raise BadInput(f"{name} ends within a message of {length} bytes")
        yield data[position : position + length]
        position += length


def fields(message: bytes, name: str) -> Iterator[tuple[int, Value]]:
    """The fields of a message: number, and a number or bytes."""
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position, name)
        if key & 7 == VARINT:
            value, position = _read_varint(message, position, name)
            yield key >> 3, value
            continue
        if key & 7 == BYTES:
            length, position = _read_varint(message, position, name)
        elif key & 7 in _WIDTH:
            length = _WIDTH[key & 7]
        else:
            raise BadInput(f"{name} has a field of the unknown type {key & 7}")
        if length > len(message) - position:
            raise BadInput(f"{name} has a field that is longer than its message")
        yield key >> 3, message[position : position + length]
        position += length


def numbers(value: Value, name: str) -> list[int]:
    """One number, or a packed list of them."""
    if isinstance(value, int):
        return [value]
    found = []
    position = 0
    while position < len(value):
        number, position = _read_varint(value, position, name)
        found.append(number)
    return found


def _read_varint(data: bytes, position: int, name: str) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise BadInput(f"{name} ends within a number")
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise BadInput(f"{name} has a number of more than 64 bits")
