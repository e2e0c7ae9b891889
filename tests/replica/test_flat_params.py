"""Parameters and gradients as views of one buffer."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.errors import BadInput, ShoalError
from shoal.replica.flat_params import ALIGN_BYTES, FlatParams
from tests.models import mlp

sizes = st.lists(st.integers(1, 70), min_size=1, max_size=12)
quick = settings(deadline=None, max_examples=50)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def flat_of(numels: list[int], dtype: torch.dtype = torch.float32) -> FlatParams:
    return FlatParams(
        (f"p{i}", nn.Parameter(torch.full((n,), i + 1.0, dtype=dtype)))
        for i, n in enumerate(numels)
    )


def backward(flat: FlatParams, order: list[int]) -> list[slice]:
    """Give each parameter the gradient i + 1, in this order; which buckets were reported."""
    reported: list[slice] = []
    flat.arm(reported.append)
    for i in order:
        p = flat.params[i]
        (p * torch.full_like(p, i + 1.0)).sum().backward()  # type: ignore[no-untyped-call]
    flat.flush()
    return reported


def test_the_layout_of_three_parameters() -> None:
    """16 floats to 64 bytes: the head takes one such line, 20 elements take two."""
    flat = flat_of([20, 3, 16])
    assert [(p.name, p.start, p.stop) for p in flat.pieces] == [
        ("p0", 16, 36),
        ("p1", 48, 51),
        ("p2", 64, 80),
    ]
    assert (flat.head_size, flat.offset, flat.size) == (4, 16, 80)


@quick
@given(sizes, dtypes)
def test_every_parameter_starts_on_a_line_of_64_bytes(n: list[int], dtype: torch.dtype) -> None:
    flat = flat_of(n, dtype)
    width = flat.data.element_size()
    assert all(piece.start * width % ALIGN_BYTES == 0 for piece in flat.pieces)
    assert flat.size * width % ALIGN_BYTES == 0
    assert [piece.stop - piece.start for piece in flat.pieces] == n
    assert all(a.stop <= b.start for a, b in itertools.pairwise(flat.pieces))


def test_parameters_keep_their_values() -> None:
    model = mlp()
    same = mlp()
    FlatParams(model.named_parameters())
    for name, tensor in same.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_parameters_become_views_of_the_buffer() -> None:
    model = mlp()
    flat = FlatParams(model.named_parameters())
    flat.data.fill_(7.0)
    assert all((p == 7.0).all() for p in model.parameters())
    with torch.no_grad():
        next(model.parameters()).fill_(8.0)
    assert (flat.data[flat.pieces[0].start : flat.pieces[0].stop] == 8.0).all()


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
    assert len(FlatParams(model.named_parameters()).pieces) == 1


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


@quick
@given(sizes, dtypes, st.integers(1, 500))
def test_buckets_are_cut_where_parameters_start(
    n: list[int], dtype: torch.dtype, num_bytes: int
) -> None:
    flat = flat_of(n, dtype)
    starts = {piece.start for piece in flat.pieces}
    assert all(bucket.start in starts for bucket in flat.buckets(num_bytes)[:-1])


@quick
@given(sizes, st.integers(1, 500))
def test_a_bucket_closes_as_soon_as_it_is_large_enough(n: list[int], num_bytes: int) -> None:
    flat = flat_of(n)
    for bucket in flat.buckets(num_bytes)[:-1]:
        assert (bucket.stop - bucket.start) * 4 >= num_bytes - 3
        inside = [p.start for p in flat.pieces if bucket.start < p.start < bucket.stop]
        assert all((bucket.stop - start) * 4 < num_bytes for start in inside)


def test_the_first_bucket_may_be_smaller() -> None:
    flat = flat_of([16] * 8)
    assert flat.buckets(256, 64) == [slice(128, 144), slice(64, 128), slice(0, 64)]
    assert flat.buckets(256) == [slice(80, 144), slice(0, 80)]


@quick
@given(sizes, dtypes, st.integers(1, 15))
def test_shards_cover_all_parameters_once(n: list[int], dtype: torch.dtype, parts: int) -> None:
    flat = flat_of(n, dtype)
    shards = flat.shards(parts)
    assert len(shards) == parts
    assert shards[0].start == flat.offset and shards[-1].stop == flat.size
    assert all(a.stop == b.start for a, b in itertools.pairwise(shards))
    boundaries = {flat.size, *(piece.start for piece in flat.pieces)}
    assert all(shard.start in boundaries for shard in shards)


@quick
@given(sizes, st.integers(1, 15))
def test_a_shard_is_at_most_one_parameter_larger_than_its_share(n: list[int], parts: int) -> None:
    flat = flat_of(n)
    starts = [*(piece.start for piece in flat.pieces), flat.size]
    largest = max(b - a for a, b in itertools.pairwise(starts))
    share = (flat.size - flat.offset) / parts
    assert all(shard.stop - shard.start <= share + largest for shard in flat.shards(parts))


def test_equal_parameters_make_equal_shards() -> None:
    flat = flat_of([16] * 8)
    assert flat.shards(4) == [slice(a, a + 32) for a in (16, 48, 80, 112)]


@quick
@given(st.permutations(range(5)), st.sampled_from([1, 64, 128, 1 << 20]))
def test_buckets_are_reported_in_index_order_whatever_order_gradients_come_in(
    order: list[int], num_bytes: int
) -> None:
    flat = flat_of([16, 20, 3, 40, 5])
    flat.watch(flat.buckets(num_bytes))
    assert backward(flat, order) == flat.buckets_of_grad
    for i, piece in enumerate(flat.pieces):
        assert (flat.grad[piece.start : piece.stop] == i + 1.0).all()
    assert (flat.head[1:] == 1.0).all()


def test_a_bucket_is_reported_while_backward_still_runs() -> None:
    flat = flat_of([16, 16])
    flat.watch(flat.buckets(64))
    reported: list[slice] = []
    flat.arm(reported.append)
    flat.params[1].sum().backward()  # type: ignore[no-untyped-call]
    assert reported == [slice(32, 48)]
    flat.params[0].sum().backward()  # type: ignore[no-untyped-call]
    assert reported == [slice(32, 48), slice(0, 32)]


def test_nothing_is_reported_unless_armed() -> None:
    flat = flat_of([16, 16])
    flat.watch(flat.buckets(64))
    flat.params[1].sum().backward()  # type: ignore[no-untyped-call]
    flat.flush()
    reported = backward(flat, [1, 0])
    assert reported == flat.buckets_of_grad
    assert (flat.grad[32:48] == 3.0).all(), "the gradient of both backwards: 1 + 2"


def test_a_parameter_without_a_gradient_counts_as_zero_with_flag_0() -> None:
    flat = flat_of([16, 16, 16])
    flat.watch(flat.buckets(64))
    backward(flat, [0, 1, 2])
    assert backward(flat, [2, 0]) == flat.buckets_of_grad
    assert flat.head[1:].tolist() == [1.0, 0.0, 1.0]
    assert not flat.grad[flat.pieces[1].start : flat.pieces[1].stop].any()


def test_publish_leaves_none_where_nobody_had_a_gradient() -> None:
    flat = flat_of([16, 16, 16])
    flat.watch(flat.buckets(64))
    backward(flat, [2, 0])
    flat.publish()
    assert flat.params[1].grad is None
    for i in (0, 2):
        grad = flat.params[i].grad
        assert grad is not None and (grad == i + 1.0).all()
        assert grad.data_ptr() == flat.grad[flat.pieces[i].start :].data_ptr()
    flat.drop_gradients()
    assert all(p.grad is None for p in flat.params)


def test_publish_hands_over_a_gradient_that_only_another_rank_had() -> None:
    flat = flat_of([16, 16])
    flat.watch(flat.buckets(64))
    backward(flat, [0])
    flat.grad[32:48] = 5.0  # as the all-reduce would
    flat.head[2] = 1.0
    flat.publish()
    assert flat.params[1].grad is not None and (flat.params[1].grad == 5.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_head_travels_with_the_bucket_that_goes_out_last(dtype: torch.dtype) -> None:
    flat = flat_of([16, 16], dtype)
    flat.watch(flat.buckets(64))
    assert not flat.head_travels_alone
    flat.head[0] = 3.0
    assert flat.grad[flat.buckets_of_grad[-1]][0] == 3.0


def test_the_head_of_a_bfloat16_model_travels_alone() -> None:
    flat = flat_of([16, 16], torch.bfloat16)
    flat.watch(flat.buckets(64))
    assert flat.head_travels_alone and flat.offset == 0
    assert flat.head.dtype == torch.float32 and flat.grad.dtype == torch.bfloat16
    flat.head[0] = 1.0009765625  # bfloat16 could not hold it
    backward(flat, [1, 0])
    assert flat.head.tolist() == [1.0009765625, 1.0, 1.0]


def test_a_second_gradient_after_the_first_was_sent_is_an_error() -> None:
    flat = flat_of([16, 16])
    flat.watch(flat.buckets(64))
    flat.arm(lambda bucket: None)
    flat.params[1].sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ShoalError, match="parameter p1 got a second gradient after it was sent"):
        flat.params[1].sum().backward()  # type: ignore[no-untyped-call]


def test_a_second_gradient_before_the_bucket_is_sent_is_added() -> None:
    flat = flat_of([16, 16])
    flat.watch(flat.buckets(64))
    assert backward(flat, [0, 0, 1]) == flat.buckets_of_grad
    assert (flat.grad[16:32] == 2.0).all()


def test_a_sparse_gradient_arrives_dense() -> None:
    embedding = nn.Embedding(4, 16, sparse=True)
    flat = FlatParams(embedding.named_parameters())
    flat.watch(flat.buckets(64))
    flat.arm(lambda bucket: None)
    embedding(torch.tensor([1, 1])).sum().backward()
    flat.flush()
    piece = flat.pieces[0]
    grad: Tensor = flat.grad[piece.start : piece.stop].view(4, 16)
    assert grad.sum(1).tolist() == [0.0, 32.0, 0.0, 0.0]


def test_a_parameter_without_elements_is_no_obstacle() -> None:
    flat = FlatParams(
        [("full", nn.Parameter(torch.ones(16))), ("empty", nn.Parameter(torch.ones(0)))]
    )
    flat.watch(flat.buckets(64))
    assert [name for name, _ in flat.named] == ["full"]
    assert backward(flat, [0]) == flat.buckets_of_grad
    assert (flat.grad[16:32] == 1.0).all()
