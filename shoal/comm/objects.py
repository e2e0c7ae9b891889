"""Bytes, values and pytrees of tensors over a group, without pickle.

all_gather_bytes, broadcast_bytes    a few bytes, in one collective of a fixed size
all_equal                            whether all ranks have the same bytes
encode, decode, all_gather_object    values: see `object_format`
PytreeChannel                        pytrees from rank to rank, tensors in place
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.comm.group import Group, Op
from shoal.comm.object_format import (
    MAX_DESCRIPTION_BYTES,
    TensorHeader,
    describe,
    rebuild,
    tensor_bytes,
)
from shoal.errors import BadInput, ShoalError
from shoal.pytree import Tree
from shoal.transport.transport import Work

MAX_BYTES = 64
_MAX_GATHERED_BYTES = 1 << 36
_CPU = torch.device("cpu")

# ------------------------------------------------------------------ bytes


def all_gather_bytes(
    group: Group, data: bytes, max_bytes: int = MAX_BYTES, device: torch.device | None = None
) -> list[bytes]:
    """The bytes of every rank, by rank: one all-gather. `max_bytes` is the same on all ranks.

    Zeros at the end are lost.
    """
    padded = _padded(data, max_bytes, device)
    gathered = padded.new_empty(group.size, max_bytes)
    group.all_gather(gathered, padded).wait()
    return [_unpadded(row) for row in gathered]


def broadcast_bytes(group: Group, data: bytes, root: int, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of the root: one broadcast. Those of the other ranks are ignored."""
    padded = _padded(data, max_bytes)
    group.broadcast(padded, root).wait()
    return _unpadded(padded)


def all_equal(group: Group, data: bytes, device: torch.device | None = None) -> bool:
    """Whether all ranks have the same bytes, of any length: one all-reduce of 16 bytes."""
    number = int.from_bytes(hashlib.sha256(data).digest()[:7], "big")
    highest = torch.tensor([number, -number], device=device)
    group.all_reduce(highest, Op.MAX).wait()
    return highest.tolist() == [number, -number]


def _padded(data: bytes, max_bytes: int, device: torch.device | None = None) -> Tensor:
    if len(data) > max_bytes:
        raise BadInput(f"{data!r} is longer than the {max_bytes} bytes that are exchanged")
    return torch.tensor(list(data.ljust(max_bytes, b"\0")), dtype=torch.uint8, device=device)


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
    if group.size == 1:
        return [decode(encode(value))]
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
        [description]  see `object_format`
        tensors        a message each, as bytes

    So shapes may change from message to message, and shapes that do not change cost 8 bytes.
    Tensors arrive on `device`; length and description are exchanged on `header_device`.
    """

    def __init__(
        self, group: Group, device: torch.device, header_device: torch.device | None = None
    ):
        self.group = group
        self.device = device
        self._header_device = header_device or _CPU
        self._sent: dict[tuple[int, int], bytes] = {}
        self._received: dict[tuple[int, int], bytes] = {}

    def send(self, tree: Tree, dst: int, tag: int) -> PytreeWork:
        description, tensors = describe(tree)
        is_new = self._sent.get((dst, tag)) != description
        self._sent[dst, tag] = description
        length = torch.tensor([len(description) if is_new else 0], device=self._header_device)
        messages = [length]
        if is_new:
            text = torch.frombuffer(bytearray(description), dtype=torch.uint8)
            messages.append(text.to(self._header_device))
        messages += [tensor_bytes(t) for t in tensors if t.numel()]
        return PytreeWork([self.group.send(m, dst, tag) for m in messages], messages)

    def recv(self, src: int, tag: int) -> Tree:
        """Tensors that required a gradient at the sender require one here: they are new leaves."""
        length = torch.zeros(1, dtype=torch.int64, device=self._header_device)
        self.group.recv(length, src, tag).wait()
        if int(length):
            self._received[src, tag] = self._recv_description(int(length), src, tag)
        if (src, tag) not in self._received:
            raise self._damaged(src, "a message without a description")
        return self._recv_tensors(self._received[src, tag], src, tag)

    def _recv_description(self, length: int, src: int, tag: int) -> bytes:
        if not 0 < length <= MAX_DESCRIPTION_BYTES:
            raise self._damaged(src, f"a description of {length} bytes")
        text = torch.zeros(length, dtype=torch.uint8, device=self._header_device)
        self.group.recv(text, src, tag).wait()
        return text.cpu().numpy().tobytes()

    def _recv_tensors(self, description: bytes, src: int, tag: int) -> Tree:
        tensors: list[Tensor] = []

        def allocate(header: TensorHeader) -> Tensor:
            tensor = torch.empty(header.shape, dtype=header.dtype, device=self.device)
            tensors.append(tensor)
            return tensor.requires_grad_() if header.requires_grad else tensor

        try:
            tree = rebuild(description, allocate, self.device)
        except ValueError as error:
            raise self._damaged(src, f"a damaged description ({error})") from error
        for tensor in tensors:
            if tensor.numel():
                self.group.recv(tensor_bytes(tensor), src, tag).wait()
        return tree

    def _damaged(self, src: int, what: str) -> ShoalError:
        return ShoalError(f"rank {self.group.rank} got {what} from rank {src}")
