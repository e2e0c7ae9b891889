"""Parameters and gradients as views of one buffer."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.errors import BadInput
from shoal.replica.flat_params import FlatParams
from shoal.schedules.buffer_layout import ALIGN_BYTES
from tests.models import mlp

sizes = st.lists(st.integers(1, 70), min_size=1, max_size=12)
quick = settings(deadline=None, max_examples=50)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def flat_of(numels: list[int], dtype: torch.dtype = torch.float32) -> FlatParams:
    return FlatParams(
        (f"p{i}", nn.Parameter(torch.full((n,), i + 1.0, dtype=dtype)))
        for i, n in enumerate(numels)
    )


def test_the_layout_of_three_parameters() -> None:
    """16 floats to 64 bytes: the header takes one such line, 20 elements take two."""
    flat = flat_of([20, 3, 16])
    assert [(p.name, p.start, p.stop) for p in flat.ranges] == [
        ("p0", 16, 36),
        ("p1", 48, 51),
        ("p2", 64, 80),
    ]
    assert (flat.header_size, flat.offset, flat.size) == (4, 16, 80)


@quick
@given(sizes, dtypes)
def test_every_parameter_starts_on_a_line_of_64_bytes(n: list[int], dtype: torch.dtype) -> None:
    flat = flat_of(n, dtype)
    width = flat.data.element_size()
    assert all(param.start * width % ALIGN_BYTES == 0 for param in flat.ranges)
    assert flat.size * width % ALIGN_BYTES == 0
    assert [param.stop - param.start for param in flat.ranges] == n
    assert all(a.stop <= b.start for a, b in itertools.pairwise(flat.ranges))


def test_parameters_become_views_of_the_buffer() -> None:
    model = mlp()
    flat = FlatParams(model.named_parameters())
    flat.data.fill_(7.0)
    assert all((p == 7.0).all() for p in model.parameters())
    with torch.no_grad():
        next(model.parameters()).fill_(8.0)
    assert (flat.data[flat.ranges[0].start : flat.ranges[0].stop] == 8.0).all()


def test_only_trainable_parameters_move() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    flat = FlatParams(model.named_parameters())
    assert [name for name, _ in flat.named] == ["2.weight", "2.bias", "4.weight", "4.bias"]
    flat.data.zero_()
    assert model[0].weight.any()


def test_tied_parameters_lie_in_the_buffer_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert len(FlatParams(model.named_parameters()).ranges) == 1


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(BadInput, match="no parameter that requires a gradient"):
        FlatParams(nn.Flatten().named_parameters())


def test_mixed_dtypes_are_refused_by_name() -> None:
    model = mlp()
    model[2].bfloat16()
    with pytest.raises(BadInput) as caught:
        FlatParams(model.named_parameters())
    assert "0.weight is torch.float32" in str(caught.value)
    assert "2.weight is torch.bfloat16" in str(caught.value)


@quick
@given(sizes, dtypes, st.integers(1, 500), st.integers(1, 500) | st.none())
def test_buckets_cover_the_buffer_once_from_the_end_to_the_start(
    n: list[int], dtype: torch.dtype, num_bytes: int, first_bytes: int | None
) -> None:
    flat = flat_of(n, dtype)
    buckets = flat.buckets(num_bytes, first_bytes)
    assert buckets[0].stop == flat.size and buckets[-1].start == 0
    assert all(a.start == b.stop for a, b in itertools.pairwise(buckets))
    assert all(b.start < b.stop for b in buckets)
    starts = {param.start for param in flat.ranges}
    assert all(bucket.start in starts for bucket in buckets[:-1])


@quick
@given(sizes, st.integers(1, 500))
def test_a_bucket_closes_as_soon_as_it_is_large_enough(n: list[int], num_bytes: int) -> None:
    flat = flat_of(n)
    for bucket in flat.buckets(num_bytes)[:-1]:
        assert (bucket.stop - bucket.start) * 4 >= num_bytes - 3
        inside = [p.start for p in flat.ranges if bucket.start < p.start < bucket.stop]
        assert all((bucket.stop - start) * 4 < num_bytes for start in inside)


def test_the_first_bucket_may_be_smaller() -> None:
    flat = flat_of([16] * 8)
    assert flat.buckets(256, 64) == [slice(128, 144), slice(64, 128), slice(0, 64)]
    assert flat.buckets(256) == [slice(80, 144), slice(0, 80)]


@quick
@given(sizes, dtypes, st.integers(1, 15))
def test_shards_cover_all_parameters_once(n: list[int], dtype: torch.dtype, parts: int) -> None:
    """Each is at most one parameter larger than its share."""
    flat = flat_of(n, dtype)
    shards = flat.shards(parts)
    assert len(shards) == parts
    assert shards[0].start == flat.offset and shards[-1].stop == flat.size
    assert all(a.stop == b.start for a, b in itertools.pairwise(shards))
    boundaries = [*(param.start for param in flat.ranges), flat.size]
    assert all(shard.start in boundaries for shard in shards)
    largest = max(b - a for a, b in itertools.pairwise(boundaries))
    share = (flat.size - flat.offset) / parts
    assert all(shard.stop - shard.start <= share + largest for shard in shards)


def test_equal_parameters_make_equal_shards() -> None:
    flat = flat_of([16] * 8)
    assert flat.shards(4) == [slice(a, a + 32) for a in (16, 48, 80, 112)]
