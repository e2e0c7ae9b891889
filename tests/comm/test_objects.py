"""Bytes, values and pytrees of tensors between ranks."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.comm.objects import (
    PytreeChannel,
    all_equal,
    all_gather_bytes,
    all_gather_object,
    broadcast_bytes,
    decode,
    describe,
    encode,
)
from shoal.errors import BadInput, ShoalError
from tests.conftest import World, run_world

CPU = torch.device("cpu")
WORDS = [b"12 7 99", b"", b"a word that fills the room: 0123"]


def test_every_rank_gets_the_bytes_of_each(world: World) -> None:
    assert world(3, lambda g: all_gather_bytes(g, WORDS[g.rank], 32)) == [WORDS] * 3


@pytest.mark.parametrize("root", [0, 1, 2])
def test_every_rank_gets_the_bytes_of_the_root(world: World, root: int) -> None:
    assert world(3, lambda g: broadcast_bytes(g, WORDS[g.rank], root, 32)) == [WORDS[root]] * 3


def test_what_is_too_long_is_refused() -> None:
    with pytest.raises(BadInput, match="longer than the 32 bytes"):
        all_gather_bytes(solo_group(), WORDS[2] + b"4", 32)


def test_ranks_compare_their_bytes(world: World) -> None:
    assert world(3, lambda g: all_equal(g, b"the same" * 99)) == [True] * 3
    other = world(3, lambda g: all_equal(g, b"mine" if g.rank == 1 else b"the same"))
    assert other == [False] * 3


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
tensors = st.builds(
    lambda shape, dtype: (torch.arange(int(torch.Size(shape).numel())) % 7).to(dtype).view(shape),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
)
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values |= st.binary()
trees = st.recursive(
    tensors | values,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b) and type(a) is type(b)


@given(trees)
def test_values_come_back_as_they_went(value: Any) -> None:
    assert same(value, decode(encode(value)))


@given(st.binary(max_size=64))
def test_damaged_bytes_are_an_error_of_ours_or_a_value(data: bytes) -> None:
    with suppress(ShoalError):
        decode(data)


@given(tensors, st.data())
def test_a_tensor_with_a_changed_byte_is_an_error_of_ours_or_a_value(
    tensor: torch.Tensor, data: st.DataObject
) -> None:
    damaged = bytearray(encode(tensor))
    position = data.draw(st.integers(0, len(damaged) - 1))
    damaged[position] = data.draw(st.integers(0, 255))
    with suppress(ShoalError):
        decode(bytes(damaged))


def test_a_tensor_that_requires_a_gradient_comes_back_without() -> None:
    assert not decode(encode(torch.ones(2, requires_grad=True) * 2)).requires_grad


def test_every_rank_gets_the_values_of_each(world: World) -> None:
    def body(group: Group) -> list[Any]:
        return all_gather_object(group, {"rank": group.rank, "text": "x" * 50 * group.rank})

    expected = [{"rank": rank, "text": "x" * 50 * rank} for rank in range(3)]
    assert world(3, body) == [expected] * 3


@pytest.mark.parametrize("damage", [b"", b"\xff\xff\xff\xff", b"more"])
def test_values_of_another_length_are_refused(damage: bytes) -> None:
    whole = encode([torch.ones(3)])
    damaged = whole[:-1] if not damage else damage + whole if damage[0] == 255 else whole + damage
    with pytest.raises(ShoalError, match="arrived damaged"):
        decode(damaged)


# ------------------------------------------------------------------ from rank to rank


def carried(*sent: Any) -> list[Any]:
    """What arrives on one tag, so that descriptions are repeated and replaced."""

    def body(group: Group) -> list[Any]:
        channel = PytreeChannel(group, CPU)
        if group.rank == 0:
            for tree in sent:
                channel.send(tree, 1, tag=3).wait()
            return []
        return [channel.recv(0, tag=3) for _ in sent]

    return list(run_world(2, body)[1])


@settings(suppress_health_check=list(HealthCheck))
@given(st.lists(trees, min_size=1, max_size=4))
def test_every_tree_arrives_as_it_was_sent(sent: list[Any]) -> None:
    assert all(map(same, sent, carried(*sent)))


def test_a_description_is_sent_once(world: World) -> None:
    def body(group: Group) -> int:
        channel = PytreeChannel(group, CPU)
        if group.rank == 1:
            for _ in range(3):
                channel.recv(0, 0)
            return 0
        return sum(len(channel.send(torch.zeros(n), 1, 0).works) for n in (4, 4, 5))

    assert world(2, body)[0] == 3 + 2 + 3  # length, description, tensor


def test_what_had_a_gradient_requires_one_again() -> None:
    first, second = carried(torch.ones(2, requires_grad=True) * 2, torch.ones(2))
    assert (first.requires_grad, first.is_leaf, second.requires_grad) == (True, True, False)


def test_what_is_no_tree_is_refused(world: World) -> None:
    def body(group: Group) -> None:
        PytreeChannel(group, CPU).send([object()], 1 - group.rank, 0)

    with pytest.raises(BadInput, match="a object cannot be sent to another worker"):
        world(2, body)


def extension(kind: int, data: bytes) -> bytes:
    return msgpack.encode(msgpack.Ext(kind, data))


def header(dtype: str, shape: list[Any], requires_grad: bool = False) -> bytes:
    """The description of one tensor."""
    return extension(1, msgpack.encode([dtype, shape, requires_grad]))


def test_types_of_torch_arrive_too() -> None:
    """A device becomes that of the receiver."""
    sent = {"shape": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": CPU, 7: b"raw"}
    (received,) = carried(sent)
    assert received == sent
    assert type(received["shape"]) is torch.Size


@pytest.mark.parametrize(
    "text",
    [
        *(-1, 0, 1 << 40),  # the length alone
        b"nonsense",
        describe([1])[0] + b"more",
        header("float32", [-1]),
        header("float32", [1e3]),
        header("float32", [1 << 60]),
        header("os", [1]),
        header("qint8", [1]),
        header("int64", [1], requires_grad=True),
        header("float64", [1 << 40, 4]),
        *(extension(1, b""), extension(2, msgpack.encode({})), extension(3, msgpack.encode([-1]))),
        *(extension(4, b"os"), extension(4, b"\xff"), extension(99, b"import os")),
        b"\x81" + extension(2, msgpack.encode([[1]])) + b"\x01",
        b"\x91" * 100_000,
    ],
)
def test_a_damaged_description_is_refused(world: World, text: bytes | int) -> None:
    def body(group: Group) -> None:
        if group.rank:
            PytreeChannel(group, CPU).recv(0, 0)
            return
        data = text if isinstance(text, bytes) else b""
        group.send(torch.tensor([len(data) or text]), 1, 0).wait()
        if data:
            group.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 1, 0).wait()

    with pytest.raises(ShoalError, match=r"rank 1 got .*(from rank 0|description|message)"):
        world(2, body)
