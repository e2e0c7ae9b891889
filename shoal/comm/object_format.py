"""The one format for structured data between ranks: a description in msgpack, without pickle.

    {"x": (tensor, 3)}   ──▶   description   {"x": TUPLE[ TENSOR["float32", [4, 2], False], 3 ]}
                               tensors       the bytes of each, from left to right, outside of it

A value is None, a bool, number, text, bytes, tensor, dtype, device or shape, or a list, tuple or
dict of values; the keys of a dict are text or integers. Other types than those of msgpack are
extensions. A description is checked before anything is allocated, and nothing in it is executed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from msgspec.msgpack import Ext
from torch import Tensor

from shoal.errors import BadInput

MAX_DESCRIPTION_BYTES = 1 << 28
_MAX_TENSOR_BYTES = 1 << 42
_MAX_LENGTH = 1 << 48
_TENSOR, _TUPLE, _SHAPE, _DTYPE, _DEVICE, _INTEGER = range(1, 7)
_PLAIN = (type(None), bool, float, str, bytes)
_DTYPE_NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 "
    "float16 bfloat16 float32 float64 complex32 complex64 complex128 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"
)
_DTYPES = {name: getattr(torch, name) for name in _DTYPE_NAMES.split() if hasattr(torch, name)}


class TensorHeader(msgspec.Struct, array_like=True, frozen=True):
    """What a description says of a tensor."""

    dtype_name: str
    shape: tuple[int, ...]
    requires_grad: bool

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = _DTYPES[self.dtype_name]
        return dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self) -> None:
        if self.dtype_name not in _DTYPES or not _are_lengths(self.shape):
            raise ValueError(f"a tensor of {self.dtype_name[:20]} {self.shape[:10]}")
        if self.requires_grad and not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise ValueError(f"a tensor of {self.dtype_name} that requires a gradient")
        if self.num_bytes > _MAX_TENSOR_BYTES:
            raise ValueError(f"a tensor of {self.num_bytes} bytes")


# Made once: msgspec crashes if two threads make it see a type for the first time.
_HEADER = msgspec.msgpack.Decoder(TensorHeader)
_LENGTHS = msgspec.msgpack.Decoder(list[int])


def describe(value: Any) -> tuple[bytes, list[Tensor]]:
    """The description of a value, and its tensors from left to right."""
    tensors: list[Tensor] = []
    try:
        description = msgspec.msgpack.encode(_packed(value, tensors))
    except (OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise BadInput(f"a value cannot be sent to another worker: {error}") from error
    if len(description) > MAX_DESCRIPTION_BYTES:
        raise BadInput(
            f"a value cannot be sent to another worker: without its tensors it takes "
            f"{len(description)} bytes, and at most {MAX_DESCRIPTION_BYTES} are sent"
        )
    return description, tensors


def rebuild(
    description: bytes | memoryview,
    make_tensor: Callable[[TensorHeader], Tensor],
    device: torch.device,
) -> Any:
    """The value of a description; `make_tensor` is called for each tensor, from left to right.

    A device in it becomes `device`. Raises ValueError if the description is damaged.
    """

    def unpack(code: int, data: memoryview) -> Any:
        if code == _TENSOR:
            header = _HEADER.decode(data)
            header.check()
            return make_tensor(header)
        if code == _TUPLE:
            items = msgspec.msgpack.decode(data, ext_hook=unpack)
            if isinstance(items, list):
                return tuple(items)
        if code == _DEVICE:
            return device
        if code == _SHAPE and _are_lengths(lengths := _LENGTHS.decode(data)):
            return torch.Size(lengths)
        if code == _DTYPE and (name := bytes(data).decode()) in _DTYPES:
            return _DTYPES[name]
        if code == _INTEGER:
            return int.from_bytes(data, "little", signed=True)
        raise ValueError(f"a damaged or unknown extension: code {code}")

    try:
        return msgspec.msgpack.decode(description, ext_hook=unpack)
    except (msgspec.MsgspecError, RecursionError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error


def tensor_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor as bytes; a copy if it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _packed(value: Any, tensors: list[Tensor]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        length = value.bit_length() // 8 + 1
        is_long = length > 8
        return Ext(_INTEGER, value.to_bytes(length, "little", signed=True)) if is_long else value
    if kind is list:
        return [_packed(item, tensors) for item in value]
    if kind is tuple:
        return _extension(_TUPLE, [_packed(item, tensors) for item in value])
    if kind is dict and all(type(key) in (str, int) for key in value):
        return {key: _packed(item, tensors) for key, item in value.items()}
    if isinstance(value, torch.Size):
        return _extension(_SHAPE, list(value))
    if isinstance(value, torch.dtype):
        return Ext(_DTYPE, _dtype_name(value).encode())
    if isinstance(value, torch.device):
        return Ext(_DEVICE, b"")
    if not isinstance(value, Tensor):
        raise BadInput(
            f"a {kind.__name__} cannot be sent to another worker: only numbers, text, bytes, "
            "tensors, and lists, tuples and dicts of these can"
        )
    name = _dtype_name(value.dtype)
    if name not in _DTYPES or value.layout != torch.strided:
        raise BadInput(f"a {value.layout} tensor of {value.dtype} cannot be sent to another worker")
    tensors.append(value)
    return _extension(_TENSOR, TensorHeader(name, tuple(value.shape), value.requires_grad))


def _extension(code: int, value: Any) -> Ext:
    return Ext(code, msgspec.msgpack.encode(value))


def _are_lengths(numbers: Sequence[int]) -> bool:
    return all(0 <= n < _MAX_LENGTH for n in numbers)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
