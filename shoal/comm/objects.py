"""Bytes, values and pytrees of tensors over a group, without pickle.

all_gather_bytes, broadcast_bytes    a few bytes, in one collective of a fixed size
all_equal                            whether all ranks have the same bytes
encode, decode, all_gather_object    values
PytreeChannel                        pytrees from rank to rank, tensors in place

The one format for structured data between ranks is a description in msgpack:

    {"x": (tensor, 3)}   ──▶   description   {"x": TUPLE[ TENSOR["float32", [4, 2], False], 3 ]}
                               tensors       the bytes of each, from left to right, outside of it

A value is None, a bool, number, text, bytes, tensor, dtype, device or shape, or a list, tuple or
dict of values; the keys of a dict are text or integers. Other types than those of msgpack are
extensions. A description is checked before anything is allocated, and nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec.msgpack import Ext
from torch import Tensor

from shoal.comm.call import PeerMessage
from shoal.comm.group import Group, Op
from shoal.comm.transport.transport import DoneWork, Work
from shoal.errors import BadInput, ShoalError
from shoal.runtime.pytree import Tree

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


MAX_BYTES = 64
_MAX_GATHERED_BYTES = 1 << 36
_CPU = torch.device("cpu")

# ------------------------------------------------------------------ bytes


def all_gather_bytes(group: Group, data: bytes, max_bytes: int = MAX_BYTES) -> list[bytes]:
    """The bytes of every rank, by rank: one all-gather. `max_bytes` is the same on all ranks.

    Zeros at the end are lost.
    """
    padded = _padded(data, max_bytes)
    gathered = padded.new_empty(group.size, max_bytes)
    group.all_gather(gathered, padded).wait()
    return [_unpadded(row) for row in gathered]


def broadcast_bytes(group: Group, data: bytes, root: int, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of the root: one broadcast. Those of the other ranks are ignored."""
    padded = _padded(data, max_bytes)
    group.broadcast(padded, root).wait()
    return _unpadded(padded)


def all_equal(group: Group, data: bytes) -> bool:
    """Whether all ranks have the same bytes, of any length: one all-reduce of 16 bytes."""
    number = int.from_bytes(hashlib.sha256(data).digest()[:7], "big")
    highest = torch.tensor([number, -number])
    group.all_reduce(highest, Op.MAX).wait()
    return highest.tolist() == [number, -number]


def _padded(data: bytes, max_bytes: int) -> Tensor:
    if len(data) > max_bytes:
        raise BadInput(f"{data!r} is longer than the {max_bytes} bytes that are exchanged")
    return torch.tensor(list(data.ljust(max_bytes, b"\0")), dtype=torch.uint8)


def _unpadded(row: Tensor) -> bytes:
    return bytes(row.tolist()).rstrip(b"\0")


# ------------------------------------------------------------------ values


def encode(value: Any) -> bytes:
    """The length of the description (4 bytes), the description, the bytes of the tensors."""
    description, tensors = describe(value)
    raw = [tensor_bytes(t.cpu()).numpy().tobytes() for t in tensors]
    return b"".join([len(description).to_bytes(4, "little"), description, *raw])


def decode(data: bytes | memoryview) -> Any:
    """The value that was encoded. Its tensors are on the CPU and do not require gradients."""
    view = memoryview(data)
    end = 4 + int.from_bytes(view[:4], "little")
    remaining = view[end:]

    def take(header: TensorHeader) -> Tensor:
        nonlocal remaining
        if len(remaining) < header.num_bytes:
            raise ValueError("a tensor is longer than its bytes")
        raw = bytearray(remaining[: header.num_bytes])
        remaining = remaining[header.num_bytes :]
        if not raw:
            return torch.empty(header.shape, dtype=header.dtype)
        return torch.frombuffer(raw, dtype=header.dtype).view(header.shape)

    try:
        value = rebuild(view[4:end], take, _CPU)
        if remaining or end > len(view):
            raise ValueError(f"{len(remaining)} bytes belong to no tensor")
    except ValueError as error:
        raise ShoalError(f"a value of another worker arrived damaged: {error}") from error
    return value


def all_gather_object(group: Group, value: Any) -> list[Any]:
    """The values of all ranks, in the order of ranks, on every rank. All ranks call it."""
    encoded = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
    lengths = torch.empty(group.size, dtype=torch.int64)
    group.all_gather(lengths, torch.tensor([encoded.numel()])).wait()
    longest = int(lengths.max())
    if int(lengths.min()) < 1 or longest * group.size > _MAX_GATHERED_BYTES:
        raise ShoalError(
            f"values of {longest} bytes cannot be gathered from {group.size} ranks: "
            f"at most {_MAX_GATHERED_BYTES} bytes are gathered"
        )
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: encoded.numel()] = encoded
    gathered = torch.empty(group.size, longest, dtype=torch.uint8)
    group.all_gather(gathered, padded).wait()
    rows = zip(gathered, lengths.tolist(), strict=True)
    return [decode(row[:length].numpy().tobytes()) for row, length in rows]


def broadcast_object(group: Group, value: Any, root: int) -> Any:
    """The value of the root, whose tensors go one by one; those of the other ranks are ignored.

    What the other ranks get is on the CPU and does not require gradients.
    """
    is_root = group.rank == root
    description, tensors = describe(value) if is_root else (b"", [])
    length = torch.tensor([len(description)])
    group.broadcast(length, root).wait()
    if not 0 < int(length) <= MAX_DESCRIPTION_BYTES:
        raise ShoalError(f"the description of a value has {int(length)} bytes")
    text = torch.empty(int(length), dtype=torch.uint8)
    if is_root:
        text = torch.frombuffer(bytearray(description), dtype=torch.uint8)
    group.broadcast(text, root).wait()
    if is_root:
        for tensor in tensors:
            if tensor.numel():
                group.broadcast(tensor_bytes(tensor.cpu()), root).wait()
        return value

    def take(header: TensorHeader) -> Tensor:
        raw = torch.empty(header.num_bytes, dtype=torch.uint8)
        if header.num_bytes:
            group.broadcast(raw, root).wait()
        return raw.view(header.dtype).view(header.shape)

    return rebuild(text.numpy().tobytes(), take, _CPU)


# ------------------------------------------------------------------ pytrees


class Envelope(NamedTuple):
    """A pytree for another rank, or with None for a tree one that comes from it."""

    peer: int
    tag: int
    tree: Tree = None


class PytreeWork(NamedTuple):
    """A pytree that is being sent. It holds the tensors until it is waited for."""

    works: list[Work]
    tensors: list[Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class PytreeChannel:
    """Sends pytrees of tensors of any shapes. Each pair of (rank, tag) is ordered by itself.

        length         8 bytes: of the description; 0 if it is the same as last time with this tag
        [description]  see the top of this file
        tensors        a message each, as bytes

    So shapes may change from message to message, and shapes that do not change cost 8 bytes.
    Length and description lie in the host's memory, tensors leave and arrive on `device`.
    """

    def __init__(self, group: Group, device: torch.device):
        self.group = group
        self.device = device
        self._sent: dict[tuple[int, int], bytes] = {}
        self._received: dict[tuple[int, int], bytes] = {}
        self._coming: dict[tuple[int, int], deque[tuple[Tree, Work]]] = defaultdict(deque)

    def send(self, tree: Tree, dst: int, tag: int) -> PytreeWork:
        return self.exchange([Envelope(dst, tag, tree)], [])

    def exchange(self, sends: Sequence[Envelope], meanwhile: Sequence[Envelope]) -> PytreeWork:
        """Send trees; those of `meanwhile` come in the same time, each with `recv`, as any other.

        Where messages meet in the order of their calls, theirs are called here, with the sends.
        """
        works: list[Work] = []
        headers: list[Tensor] = []
        messages: list[PeerMessage] = []
        for peer, tag, tree in sends:
            description, tensors = describe(tree)
            is_new = self._sent.get((peer, tag)) != description
            self._sent[peer, tag] = description
            header = [torch.tensor([len(description) if is_new else 0])]
            if is_new:
                header.append(torch.frombuffer(bytearray(description), dtype=torch.uint8))
            works += [self.group.send(each, peer, tag) for each in header]
            headers += header
            if self.group.executor.in_order:
                tensors = [t.to(self.device) for t in tensors]
            messages += [PeerMessage(tensor_bytes(t), peer, tag) for t in tensors if t.numel()]
        sent = [message.data for message in messages]
        if not self.group.executor.in_order:
            works += [self.group.send(m.data, m.peer, m.tag) for m in messages]
            return PytreeWork(works, [*headers, *sent])
        trees = [self._announced(peer, tag) for peer, tag, _ in meanwhile]
        receives = [message for _, incoming in trees for message in incoming]
        work: Work = DoneWork()
        if messages or receives:
            work = self.group.exchange(messages, receives)
        for (peer, tag, _), (tree, _) in zip(meanwhile, trees, strict=True):
            self._coming[peer, tag].append((tree, work))
        return PytreeWork([*works, work], [*headers, *sent])

    def recv(self, src: int, tag: int) -> Tree:
        """Tensors that required a gradient at the sender require one here: they are new leaves."""
        coming = self._coming.get((src, tag))
        if coming:
            tree, work = coming.popleft()
            work.wait()
            return tree
        tree, messages = self._announced(src, tag)
        self.group.exchange([], messages).wait()
        return tree

    def gather(self, tree: Tree, tag: int) -> list[Tree]:
        """The trees of all ranks on the first one; the others get their own."""
        if self.group.rank != 0:
            self.send(tree, 0, tag).wait()
            return [tree]
        return [tree, *(self.recv(rank, tag) for rank in range(1, self.group.size))]

    def _announced(self, src: int, tag: int) -> tuple[Tree, list[PeerMessage]]:
        """The tree that comes next, and the messages that fill its tensors."""
        length = torch.zeros(1, dtype=torch.int64)
        self.group.recv(length, src, tag).wait()
        if int(length):
            self._received[src, tag] = self._recv_description(int(length), src, tag)
        if (src, tag) not in self._received:
            raise self._damaged(src, "a message without a description")
        tensors: list[Tensor] = []

        def allocate(header: TensorHeader) -> Tensor:
            tensor = torch.empty(header.shape, dtype=header.dtype, device=self.device)
            tensors.append(tensor)
            return tensor.requires_grad_() if header.requires_grad else tensor

        try:
            tree = rebuild(self._received[src, tag], allocate, self.device)
        except ValueError as error:
            raise self._damaged(src, f"a damaged description ({error})") from error
        return tree, [PeerMessage(tensor_bytes(t), src, tag) for t in tensors if t.numel()]

    def _recv_description(self, length: int, src: int, tag: int) -> bytes:
        if not 0 < length <= MAX_DESCRIPTION_BYTES:
            raise self._damaged(src, f"a description of {length} bytes")
        text = torch.zeros(length, dtype=torch.uint8)
        self.group.recv(text, src, tag).wait()
        return text.numpy().tobytes()

    def _damaged(self, src: int, what: str) -> ShoalError:
        return ShoalError(f"rank {self.group.rank} got {what} from rank {src}")
