"""Chakra's nodes, and files of them: `NAME.RANK.et`, GlobalMetadata and then nodes.

After et_def.proto of mlcommons/chakra:

    GlobalMetadata   version = 1
    Node             id = 1, name = 2, type = 3, data_deps = 5, start_time_micros = 6,
                     duration_micros = 7, attr = 10
    AttributeProto   name = 1, int32_val = 7, int64_val = 9, uint64_val = 13, bool_val = 27,
                     string_val = 29
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from shoal.errors import BadInput
from shoal.plan.chakra import wire

VERSION = "0.0.4"
_INT32, _INT64, _UINT64, _BOOL, _STRING = 7, 9, 13, 27, 29
# the type that readers expect of an attribute
_TYPES = {
    "is_cpu_op": _BOOL,
    "num_ops": _INT64,
    "tensor_size": _UINT64,
    "comm_type": _INT64,
    "comm_size": _INT64,
    "comm_src": _INT32,
    "comm_dst": _INT32,
    "comm_tag": _INT32,
    "pg_name": _STRING,
}
Attribute = int | bool | str


class NodeType(IntEnum):
    COMPUTE = 4  # COMP_NODE
    SEND = 5  # COMM_SEND_NODE
    RECEIVE = 6  # COMM_RECV_NODE
    COLLECTIVE = 7  # COMM_COLL_NODE


# CollectiveCommType; scans have none
COMM_TYPES = {
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
    "barrier": 9,
}


@dataclass
class ChakraNode:
    """One operation of one rank; `data_deps` are the nodes that end before it begins."""

    id: int
    name: str
    type: NodeType
    data_deps: list[int] = field(default_factory=list)
    start_us: int = 0
    duration_us: int = 0
    attributes: dict[str, Attribute] = field(default_factory=dict)

    def encoded(self) -> bytes:
        parts = [
            wire.number_field(1, self.id) if self.id else b"",
            wire.text_field(2, self.name),
            wire.number_field(3, self.type),
            wire.packed_field(5, self.data_deps),
            wire.number_field(6, self.start_us) if self.start_us else b"",
            wire.number_field(7, self.duration_us) if self.duration_us else b"",
        ]
        parts += [wire.bytes_field(10, _attribute(*item)) for item in self.attributes.items()]
        return b"".join(parts)


def write_nodes(path: Path, nodes: list[ChakraNode]) -> None:
    """One rank's file."""
    metadata = wire.text_field(1, VERSION)
    data = b"".join(wire.with_length(m) for m in (metadata, *(one.encoded() for one in nodes)))
    try:
        path.write_bytes(data)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from error


def read_nodes(path: Path) -> list[ChakraNode]:
    """The nodes of a file; attributes and fields that are not listed above are passed over."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    found = list(wire.messages(data, str(path)))
    if not found:
        raise BadInput(f"{path} is empty: a Chakra trace begins with its metadata")
    return [_node(message, str(path)) for message in found[1:]]


def _attribute(name: str, value: Attribute) -> bytes:
    kind = _TYPES[name]
    if isinstance(value, str):
        return wire.text_field(1, name) + wire.text_field(kind, value)
    return wire.text_field(1, name) + wire.number_field(kind, int(value))


def _node(message: bytes, name: str) -> ChakraNode:
    numbers = {1: 0, 3: 0, 6: 0, 7: 0}
    text = ""
    after: list[int] = []
    attributes: dict[str, Attribute] = {}
    for key, value in wire.fields(message, name):
        if key in numbers and isinstance(value, int):
            numbers[key] = value
        elif key == 2 and isinstance(value, bytes):
            text = value.decode(errors="replace")
        elif key == 5:
            after += wire.numbers(value, name)
        elif key == 10 and isinstance(value, bytes):
            attributes |= _attribute_of(value, name)
    if numbers[3] not in list(NodeType):
        raise BadInput(f"{name}: node {numbers[1]} has the type {numbers[3]}, which is not known")
    kind = NodeType(numbers[3])
    return ChakraNode(numbers[1], text, kind, after, numbers[6], numbers[7], attributes)


def _attribute_of(message: bytes, name: str) -> dict[str, Attribute]:
    found = dict(wire.fields(message, name))
    called = found.get(1, b"")
    assert isinstance(called, bytes)
    key = called.decode(errors="replace")
    value = found.get(_TYPES.get(key, 0))
    if value is None:
        return {}
    if isinstance(value, bytes):
        return {key: value.decode(errors="replace")}
    return {key: bool(value) if _TYPES[key] == _BOOL else value}
