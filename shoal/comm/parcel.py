"""Trees of tensors from rank to rank, whatever their shapes.

    length   8 bytes: of the description, or 0: it is as it was the last time with this tag
    [description]   JSON: the tree, its plain values, dtype and shape of every tensor
    tensors  a message each, as bytes

So shapes may change from message to message, and those that do not cost 8 bytes. What arrives is
checked before anything is allocated, and nothing in it is executed.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.errors import BadInput, ShoalError
from shoal.pytree import Tree
from shoal.transport.transport import Work

_LONGEST_DESCRIPTION = 16 << 20
_LARGEST_TENSOR_BYTES = 1 << 42
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
Node = list[Any]


class Sent(NamedTuple):
    """A tree on its way. It holds the tensors until it is waited for."""

    works: list[Work]
    tensors: list[Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Post:
    """One rank's end; every pair of (rank, tag) is a channel of its own, in order."""

    def __init__(self, group: Group, device: torch.device):
        self.group = group
        self.device = device
        self._told: dict[tuple[int, int], bytes] = {}
        self._known: dict[tuple[int, int], Node] = {}

    def send(self, tree: Tree, dst: int, tag: int) -> Sent:
        tensors: list[Tensor] = []
        text = json.dumps(describe(tree, tensors)).encode()
        if len(text) > _LONGEST_DESCRIPTION:
            raise BadInput(f"a tree whose description takes {len(text)} bytes cannot be sent")
        is_new = self._told.get((dst, tag)) != text
        self._told[dst, tag] = text
        messages = [torch.tensor([len(text) if is_new else 0])]
        if is_new:
            messages.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        messages += [_bytes_of(t) for t in tensors if t.numel()]
        return Sent([self.group.send(m, dst, tag) for m in messages], messages)

    def recv(self, src: int, tag: int) -> Tree:
        """Tensors that had a gradient at the sender require one here: they are new leaves."""
        length = torch.zeros(1, dtype=torch.int64)
        self.group.recv(length, src, tag).wait()
        if int(length):
            self._known[src, tag] = self._read(int(length), src, tag)
        node = self._known.get((src, tag))
        if node is None:
            raise self._damaged(src, "a message without a description")
        tensors: list[Tensor] = []
        tree = self._build(node, tensors, src)
        for tensor in tensors:
            if tensor.numel():
                self.group.recv(_bytes_of(tensor), src, tag).wait()
        return tree

    def _read(self, length: int, src: int, tag: int) -> Node:
        if not 0 < length <= _LONGEST_DESCRIPTION:
            raise self._damaged(src, f"a description of {length} bytes")
        text = torch.zeros(length, dtype=torch.uint8)
        self.group.recv(text, src, tag).wait()
        try:
            node = json.loads(bytes(text.tolist()))
        except (ValueError, RecursionError) as error:
            raise self._damaged(src, "a description that is no JSON") from error
        if not isinstance(node, list):
            raise self._damaged(src, "a description that is no tree")
        return node

    def _build(self, node: Any, tensors: list[Tensor], src: int) -> Tree:
        match node:
            case ["tensor", str(dtype), list(shape), bool(needs_grad)]:
                tensor = self._empty(dtype, shape, src)
                tensors.append(tensor)
                return tensor.requires_grad_() if needs_grad else tensor
            case ["value", (None | bool() | int() | float() | str()) as value]:
                return value
            case ["tuple", *items]:
                return tuple(self._build(item, tensors, src) for item in items)
            case ["list", *items]:
                return [self._build(item, tensors, src) for item in items]
            case ["dict", *items] if all(_is_entry(item) for item in items):
                return {key: self._build(item, tensors, src) for key, item in items}
            case ["size", *numbers] if _are_lengths(numbers):
                return torch.Size(numbers)
            case ["dtype", str(name)] if name in _DTYPES:
                return _DTYPES[name]
            case ["device"]:
                return self.device
        raise self._damaged(src, f"a tree with {str(node)[:60]!r} in it")

    def _empty(self, name: str, shape: list[Any], src: int) -> Tensor:
        dtype = _DTYPES.get(name)
        if dtype is None or not _are_lengths(shape):
            raise self._damaged(src, f"a tensor of {name} {shape}")
        if math.prod(shape) * dtype.itemsize > _LARGEST_TENSOR_BYTES:
            raise self._damaged(src, f"a tensor of {name} {shape}")
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _damaged(self, src: int, what: str) -> ShoalError:
        return ShoalError(f"rank {self.group.rank} got {what} from rank {src}")


def describe(tree: Tree, tensors: list[Tensor]) -> Node:
    """The tree as JSON has it; its tensors are added to `tensors` from left to right."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        name = str(tree.dtype).removeprefix("torch.")
        return ["tensor", name, list(tree.shape), tree.requires_grad]
    if isinstance(tree, torch.Size):
        return ["size", *tree]
    if type(tree) in (tuple, list):
        return [type(tree).__name__, *(describe(item, tensors) for item in tree)]
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        return ["dict", *([key, describe(item, tensors)] for key, item in tree.items())]
    if isinstance(tree, torch.dtype):
        return ["dtype", str(tree).removeprefix("torch.")]
    if isinstance(tree, torch.device):
        return ["device"]
    if tree is None or type(tree) in (bool, int, float, str):
        return ["value", tree]
    raise BadInput(
        f"a {type(tree).__name__} cannot go from one worker to another: only tensors, plain "
        "values, and tuples, lists and dicts of them can"
    )


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a tensor; a copy where it is not in one piece."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _is_entry(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)


def _are_lengths(numbers: list[Any]) -> bool:
    return all(type(n) is int and 0 <= n < 1 << 48 for n in numbers)
