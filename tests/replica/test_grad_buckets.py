"""Gradients are collected in buckets of one buffer while backward runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.replica.flat_params import FlatParams
from tests.replica.test_flat_params import flat_of, quick


def backward(flat: FlatParams, order: list[int]) -> list[slice]:
    """Give each parameter the gradient i + 1, in this order; which buckets were reported."""
    reported: list[slice] = []
    flat.grads.arm(reported.append)
    for i in order:
        p = flat.params[i]
        (p * torch.full_like(p, i + 1.0)).sum().backward()  # type: ignore[no-untyped-call]
    flat.grads.flush()
    return reported


@quick
@given(st.permutations(range(5)), st.sampled_from([1, 64, 128, 1 << 20]))
def test_buckets_are_reported_in_index_order_whatever_order_gradients_come_in(
    order: list[int], num_bytes: int
) -> None:
    flat = flat_of([16, 20, 3, 40, 5])
    flat.grads.watch(flat.buckets(num_bytes))
    assert backward(flat, order) == flat.grads.buckets
    for i, param in enumerate(flat.ranges):
        assert (flat.grads.buffer[param.start : param.stop] == i + 1.0).all()
    assert (flat.grads.header[1:] == 1.0).all()


def test_a_bucket_is_reported_while_backward_still_runs() -> None:
    flat = flat_of([16, 16])
    flat.grads.watch(flat.buckets(64))
    reported: list[slice] = []
    flat.grads.arm(reported.append)
    flat.params[1].sum().backward()  # type: ignore[no-untyped-call]
    assert reported == [slice(32, 48)]
    flat.params[0].sum().backward()  # type: ignore[no-untyped-call]
    assert reported == [slice(32, 48), slice(0, 32)]


def test_nothing_is_reported_unless_armed() -> None:
    flat = flat_of([16, 16])
    flat.grads.watch(flat.buckets(64))
    flat.params[1].sum().backward()  # type: ignore[no-untyped-call]
    flat.grads.flush()
    reported = backward(flat, [1, 0])
    assert reported == flat.grads.buckets
    assert (flat.grads.buffer[32:48] == 3.0).all(), "the gradient of both backwards: 1 + 2"


def test_a_parameter_without_a_gradient_counts_as_zero_with_flag_0() -> None:
    flat = flat_of([16, 16, 16])
    flat.grads.watch(flat.buckets(64))
    backward(flat, [0, 1, 2])
    assert backward(flat, [2, 0]) == flat.grads.buckets
    assert flat.grads.header[1:].tolist() == [1.0, 0.0, 1.0]
    assert not flat.grads.buffer[flat.ranges[1].start : flat.ranges[1].stop].any()


def test_publish_leaves_none_where_no_rank_had_a_gradient() -> None:
    flat = flat_of([16, 16, 16])
    flat.grads.watch(flat.buckets(64))
    backward(flat, [2, 0])
    flat.grads.publish()
    assert flat.params[1].grad is None
    for i in (0, 2):
        grad = flat.params[i].grad
        assert grad is not None and (grad == i + 1.0).all()
        assert grad.data_ptr() == flat.grads.buffer[flat.ranges[i].start :].data_ptr()
    flat.zero_grad()
    assert all(p.grad is None for p in flat.params)


def test_publish_hands_over_a_gradient_that_only_another_rank_had() -> None:
    flat = flat_of([16, 16])
    flat.grads.watch(flat.buckets(64))
    backward(flat, [0])
    flat.grads.buffer[32:48] = 5.0  # as the all-reduce would
    flat.grads.header[2] = 1.0
    flat.grads.publish()
    assert flat.params[1].grad is not None and (flat.params[1].grad == 5.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_header_travels_with_the_bucket_that_goes_out_last(dtype: torch.dtype) -> None:
    flat = flat_of([16, 16], dtype)
    flat.grads.watch(flat.buckets(64))
    assert flat.header_fits
    flat.grads.header[0] = 3.0
    assert len(flat.grads.tensors[flat.grads.buckets[-1].start]) == 1
    assert flat.grads.buffer[flat.grads.buckets[-1]][0] == 3.0


def test_the_header_of_a_bfloat16_model_follows_the_last_bucket() -> None:
    flat = flat_of([16, 16], torch.bfloat16)
    flat.grads.watch(flat.buckets(64))
    assert not flat.header_fits and flat.offset == 0
    assert flat.grads.header.dtype == torch.float32 and flat.grads.buffer.dtype == torch.bfloat16
    flat.grads.header[0] = 1.0009765625  # bfloat16 could not hold it
    backward(flat, [1, 0])
    assert flat.grads.header.tolist() == [1.0009765625, 1.0, 1.0]
    assert all(t is not flat.grads.header for t in flat.grads.tensors[flat.grads.buckets[0].start])
    assert flat.grads.tensors[flat.grads.buckets[-1].start][-1] is flat.grads.header


def test_a_second_gradient_after_the_first_was_sent_is_an_error() -> None:
    flat = flat_of([16, 16])
    flat.grads.watch(flat.buckets(64))
    flat.grads.arm(lambda bucket: None)
    flat.params[1].sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ShoalError, match="parameter p1 got a second gradient after it was sent"):
        flat.params[1].sum().backward()  # type: ignore[no-untyped-call]


def test_a_second_gradient_before_the_bucket_is_sent_is_added() -> None:
    flat = flat_of([16, 16])
    flat.grads.watch(flat.buckets(64))
    assert backward(flat, [0, 0, 1]) == flat.grads.buckets
    assert (flat.grads.buffer[16:32] == 2.0).all()


def test_a_sparse_gradient_arrives_dense() -> None:
    embedding = nn.Embedding(4, 16, sparse=True)
    flat = FlatParams(embedding.named_parameters())
    flat.grads.watch(flat.buckets(64))
    flat.grads.arm(lambda bucket: None)
    embedding(torch.tensor([1, 1])).sum().backward()
    flat.grads.flush()
    param = flat.ranges[0]
    grad: Tensor = flat.grads.buffer[param.start : param.stop].view(4, 16)
    assert grad.sum(1).tolist() == [0.0, 32.0, 0.0, 0.0]


def test_a_parameter_without_elements_is_no_obstacle() -> None:
    flat = FlatParams(
        [("full", nn.Parameter(torch.ones(16))), ("empty", nn.Parameter(torch.ones(0)))]
    )
    flat.grads.watch(flat.buckets(64))
    assert [name for name, _ in flat.named] == ["full"]
    assert backward(flat, [0]) == flat.grads.buckets
    assert (flat.grads.buffer[16:32] == 1.0).all()
