"""Bytes and values between ranks."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.comm.objects import (
    all_equal,
    all_gather_bytes,
    all_gather_object,
    broadcast_bytes,
    decode,
    encode,
)
from shoal.errors import BadInput, ShoalError
from tests.conftest import World

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


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
shapes = st.lists(st.integers(0, 3), max_size=3)
tensors = st.builds(lambda shape, dtype: torch.ones(shape, dtype=dtype), shapes, dtypes)
leaves = (
    st.none() | st.booleans() | st.integers()
    | st.floats(allow_nan=False) | st.text() | st.binary()
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_values_come_back_as_they_went(value: Any) -> None:
    decoded = decode(encode(value))
    assert decoded == value
    assert type(decoded) is type(value)


@given(tensors)
def test_tensors_come_back_as_they_went(tensor: torch.Tensor) -> None:
    decoded = decode(encode([tensor]))[0]
    assert decoded.dtype == tensor.dtype
    assert torch.equal(decoded, tensor)


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
