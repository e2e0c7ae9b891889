"""Values as bytes and back, without pickle: what ranks may tell each other.

None, True and False, numbers, text, bytes, tensors, and lists, tuples and dicts of these, as
msgpack. A tensor is its type, its shape and its raw bytes; it comes back on the CPU.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.errors import BadInput, ShoalError

_TENSOR = 1
_TUPLE = 2
_PLAIN = (type(None), bool, int, float, str, bytes)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
    )
}
MOST_BYTES = 1 << 36


class _Head(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]


# made once: msgspec crashes if two threads make it meet a type for the first time
_HEAD = msgspec.msgpack.Decoder(_Head)


def encode(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(_packed(value))
    except (OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise BadInput(f"a result cannot travel between workers: {error}") from error


def decode(data: bytes | memoryview) -> Any:
    try:
        return msgspec.msgpack.decode(data, ext_hook=_unpacked)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ShoalError(f"what another worker has sent is damaged: {error}") from error


def gather_values(group: Group, value: Any) -> list[Any]:
    """Everybody's value, in the order of ranks, on every rank. All ranks call it."""
    own = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
    lengths = torch.empty(group.size, dtype=torch.int64)
    group.all_gather(lengths, torch.tensor([own.numel()])).wait()
    longest = int(lengths.max())
    if int(lengths.min()) < 1 or longest * group.size > MOST_BYTES:
        raise ShoalError(f"results of {longest} bytes are more than workers tell each other")
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: own.numel()] = own
    everything = torch.empty(group.size, longest, dtype=torch.uint8)
    group.all_gather(everything, padded).wait()
    rows = zip(everything, lengths.tolist(), strict=True)
    return [decode(row[:length].numpy().tobytes()) for row, length in rows]


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return msgspec.msgpack.Ext(_TENSOR, _tensor_bytes(value))
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        inner = msgspec.msgpack.encode([_packed(item) for item in value])
        return msgspec.msgpack.Ext(_TUPLE, inner)
    if kind is list:
        return [_packed(item) for item in value]
    if kind is dict and all(type(key) in (str, int) for key in value):
        return {key: _packed(item) for key, item in value.items()}
    raise BadInput(
        f"a result that is a {kind.__name__} cannot travel between workers: return numbers, text, "
        "tensors, or lists, tuples and dicts of these"
    )


def _tensor_bytes(tensor: Tensor) -> bytes:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES or tensor.layout != torch.strided:
        raise BadInput(f"a {tensor.layout} tensor of {tensor.dtype} cannot travel between workers")
    plain = tensor.detach().cpu().contiguous()
    head = msgspec.msgpack.encode(_Head(name, tuple(plain.shape)))
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return len(head).to_bytes(4, "little") + head + raw


def _unpacked(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        inner = decode(data)
        if not isinstance(inner, list):
            raise ValueError("a tuple that is none")
        return tuple(inner)
    if code != _TENSOR:
        raise ValueError(f"unknown kind {code}")
    end = 4 + int.from_bytes(data[:4], "little")
    head = _HEAD.decode(data[4:end])
    dtype = _DTYPES.get(head.dtype)
    if dtype is None or any(length < 0 for length in head.shape):
        raise ValueError(f"a tensor of {head.dtype}")
    if len(data) - end != math.prod(head.shape) * dtype.itemsize:
        raise ValueError("a tensor of another length than it says")
    if end == len(data):
        return torch.empty(head.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data[end:]), dtype=dtype).view(head.shape)
