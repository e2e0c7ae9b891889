"""Chakra traces: the bytes of protobuf, dependences as in the run, one sentence for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.observe.trace import Span, chrome_events, read_chrome
from shoal.plan.chakra.from_spans import to_chakra
from shoal.plan.chakra.nodes import ChakraNode, NodeType, read_nodes, write_nodes
from tests.commands.terminal import shoal

OVERLAP = [
    Span("forward", 0, 10_000, "main", "F0"),
    Span("backward", 10_000, 30_000, "main", "B0"),
    Span("reduce", 18_000, 40_000, "comm", "all_reduce ring 4096 bytes"),
    Span("wait", 30_000, 41_000, "main", "all_reduce ring 4096 bytes"),
    Span("update", 41_000, 45_000, "main", ""),
    Span("step", 0, 45_000, "steps", "step 0"),
]


def test_a_node_has_the_bytes_that_protobuf_writes() -> None:
    """Compared once with the classes that protoc makes of et_def.proto; these are their bytes."""
    node = ChakraNode(
        300,
        "all_reduce",
        NodeType.COLLECTIVE,
        [1, 299],
        7,
        12,
        {"is_cpu_op": False, "comm_type": 0, "comm_size": 4096, "pg_name": "1"},
    )
    assert node.encoded().hex() == (
        "08ac02"  # id
        "120a616c6c5f726564756365"  # name
        "1807"  # type
        "2a0301ab02"  # data_deps, packed
        "3007380c"  # start, duration
        "520e0a0969735f6370755f6f70d80100"  # is_cpu_op: false is written
        "520d0a09636f6d6d5f747970654800"  # comm_type
        "520e0a09636f6d6d5f73697a65488020"  # comm_size
        "520d0a0770675f6e616d65ea010131"  # pg_name
    )


def test_a_file_is_read_back(tmp_path: Path) -> None:
    nodes = to_chakra({0: OVERLAP}).nodes_by_rank[0]
    write_nodes(tmp_path / "x.0.et", nodes)
    assert read_nodes(tmp_path / "x.0.et") == nodes


def test_an_operation_beside_computing_depends_on_what_came_before_it_alone() -> None:
    nodes = to_chakra({0: OVERLAP}).nodes_by_rank[0]
    named = [(one.name, one.data_deps, one.duration_us) for one in nodes]
    assert named == [
        ("forward F0", [], 10),
        ("backward B0", [0], 8),
        ("all_reduce ring 4096 bytes", [1], 22),
        ("backward B0", [1], 12),
        ("update", [2, 3], 4),
    ]
    assert nodes[2].type is NodeType.COLLECTIVE
    assert nodes[2].attributes == {"is_cpu_op": False, "comm_type": 0, "comm_size": 4096}


def test_both_ends_of_a_message_have_one_tag_and_a_lonely_one_is_left_out() -> None:
    sends = [Span("send", at, at, "issued", "send 8 bytes to 1") for at in (1, 2, 3)]
    receives = [Span("receive", at, at, "issued", "receive 8 bytes from 0") for at in (1, 2)]
    waits = [Span("wait", 3, 9_000, "main", "receive 8 bytes from 0")]
    compute = [Span("forward", 9_000, 10_000, "main", "F0")]
    trace = to_chakra({0: sends, 1: [*receives, *waits, *compute]})
    tags = {
        rank: [one.attributes.get("comm_tag") for one in nodes]
        for rank, nodes in trace.nodes_by_rank.items()
    }
    assert tags == {0: [1, 2], 1: [1, 2, None]} and trace.lonely == 1
    assert trace.nodes_by_rank[1][2].data_deps == [0]  # it waited for the first one
    assert trace.nodes_by_rank[0][0].attributes["comm_dst"] == 1


def test_groups_of_some_ranks_get_names() -> None:
    one = [Span("reduce", 0, 1, "comm", "all_gather shared memory 64 bytes among 0,2")]
    whole = [Span("reduce", 0, 1, "comm", "all_gather shared memory 64 bytes among 0,1,2")]
    trace = to_chakra({0: one, 1: whole, 2: one})
    assert [tuple(group) for group in trace.groups] == [("1", (0, 2))]
    assert trace.nodes_by_rank[2][0].attributes["pg_name"] == "1"
    assert "pg_name" not in trace.nodes_by_rank[1][0].attributes


def test_the_command_writes_a_file_per_rank(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"traceEvents": chrome_events({0: OVERLAP, 1: OVERLAP})}))
    assert read_chrome(file)[0] == OVERLAP
    done = shoal("trace", "export", str(file), "--chakra", str(tmp_path / "run"), "--step", "0")
    assert done.exit_code == 0 and "10 nodes of 2 ranks" in done.stdout
    assert len(read_nodes(tmp_path / "run.1.et")) == 5
    wrong = shoal("trace", "export", str(file), "--chakra", str(tmp_path / "run"), "--step", "7")
    assert wrong.exit_code == 2 and "the trace has no step 7" in wrong.stderr


@pytest.mark.parametrize(
    "span, sentence",
    [
        (Span("push", 0, 1, "push server 0", "COMMIT"), "parameter servers, which have no trace"),
        (Span("reduce", 0, 1, "comm", "scan ring 8 bytes"), "the operation 'scan ring 8 bytes'"),
    ],
)
def test_what_chakra_cannot_say_is_refused(span: Span, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        to_chakra({0: [span]})


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"traceEvents": [3]}', '{"traceEvents": [{"ph": "X", "pid": "a"}]}']
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(BadInput, match="is no trace of `shoal run --trace`"):
        read_chrome(tmp_path / "t.json")


@pytest.mark.parametrize(
    "data, sentence",
    [
        (b"", "is empty"),
        (b"\x05\x0a", "ends within a message"),
        (b"\x00\x01\x0a", "ends within a number"),
        (b"\x00\x03\x12\x7f\x00", "longer than its message"),
        (b"\x00\x02\x18\x63", "node 0 has the type 99"),
        (b"\xff" * 11, "more than 64 bits"),
        (b"\x00\x01\x0b", "unknown type 3"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, data: bytes, sentence: str) -> None:
    (tmp_path / "x.0.et").write_bytes(data)
    with pytest.raises(BadInput, match=sentence):
        read_nodes(tmp_path / "x.0.et")
