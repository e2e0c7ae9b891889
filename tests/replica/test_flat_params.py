"""Parameters and gradients as views of one buffer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.commands.examples.gpt import GPT, Size
from shoal.errors import BadInput, ShoalError
from shoal.replica.flat_params import FlatParams
from shoal.replica.fsdp.unit_gather import wrap_modules
from shoal.schedules.buffer_layout import ALIGN_BYTES
from tests.conftest import World
from tests.models import mlp
from tests.splitting import model, on_workers

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


def test_only_trainable_parameters_move_and_those_that_are_tied_once() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    model.append(nn.Linear(12, 3, bias=False))
    model[5].weight = model[4].weight
    flat = FlatParams(model.named_parameters())
    assert [name for name, _ in flat.named] == ["2.weight", "2.bias", "4.weight", "4.bias"]
    flat.data.zero_()
    assert model[0].weight.any()


def test_no_trainable_parameters_and_mixed_dtypes_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match="no parameter that requires a gradient"):
        FlatParams(nn.Flatten().named_parameters())
    model = mlp()
    model[2].bfloat16()
    with pytest.raises(BadInput, match=r"0.weight is torch.float32.*2.weight is torch.bfloat16"):
        FlatParams(model.named_parameters())


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


def test_buckets_and_shards_of_equal_parameters() -> None:
    """The first bucket may be smaller."""
    flat = flat_of([16] * 8)
    assert flat.buckets(256, 64) == [slice(128, 144), slice(64, 128), slice(0, 64)]
    assert flat.buckets(256) == [slice(80, 144), slice(0, 80)]
    assert flat.shards(4) == [slice(a, a + 32) for a in (16, 48, 80, 112)]


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


# ---- gradients are collected in buckets of one buffer while backward runs ------------------------


def watched(
    numels: list[int], dtype: torch.dtype = torch.float32, num_bytes: int = 64
) -> FlatParams:
    flat = flat_of(numels, dtype)
    flat.grads.watch(flat.buckets(num_bytes))
    return flat


def backward(flat: FlatParams, order: list[int]) -> list[slice]:
    """Give each parameter the gradient i + 1, in this order; which buckets were reported."""
    reported: list[slice] = []
    flat.grads.arm(reported.append)
    for i in order:
        p = flat.params[i]
        (p * torch.full_like(p, i + 1.0)).sum().backward()
    flat.grads.flush()
    return reported


@quick
@given(st.permutations(range(5)), st.sampled_from([1, 64, 128, 1 << 20]))
def test_buckets_are_reported_in_index_order_whatever_order_gradients_come_in(
    order: list[int], num_bytes: int
) -> None:
    flat = watched([16, 20, 3, 40, 5], num_bytes=num_bytes)
    assert backward(flat, order) == flat.grads.buckets
    for i, param in enumerate(flat.ranges):
        assert (flat.grads.buffer[param.start : param.stop] == i + 1.0).all()
    assert (flat.grads.header[1:] == 1.0).all()


def test_a_bucket_is_reported_while_backward_still_runs() -> None:
    flat = watched([16, 16])
    reported: list[slice] = []
    flat.grads.arm(reported.append)
    flat.params[1].sum().backward()
    assert reported == [slice(32, 48)]
    flat.params[0].sum().backward()
    assert reported == [slice(32, 48), slice(0, 32)]


def test_nothing_is_reported_unless_armed() -> None:
    flat = watched([16, 16])
    flat.params[1].sum().backward()
    flat.grads.flush()
    reported = backward(flat, [1, 0])
    assert reported == flat.grads.buckets
    assert (flat.grads.buffer[32:48] == 3.0).all(), "the gradient of both backwards: 1 + 2"


def test_a_parameter_without_a_gradient_counts_as_zero_with_flag_0() -> None:
    flat = watched([16, 16, 16])
    backward(flat, [0, 1, 2])
    assert backward(flat, [2, 0]) == flat.grads.buckets
    assert flat.grads.header[1:].tolist() == [1.0, 0.0, 1.0]
    assert not flat.grads.buffer[flat.ranges[1].start : flat.ranges[1].stop].any()


def test_publish_leaves_none_where_no_rank_had_a_gradient() -> None:
    flat = watched([16, 16, 16])
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
    flat = watched([16, 16])
    backward(flat, [0])
    flat.grads.buffer[32:48] = 5.0  # as the all-reduce would
    flat.grads.header[2] = 1.0
    flat.grads.publish()
    assert flat.params[1].grad is not None and (flat.params[1].grad == 5.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_header_travels_with_the_bucket_that_goes_out_last(dtype: torch.dtype) -> None:
    flat = watched([16, 16], dtype)
    assert flat.header_fits
    flat.grads.header[0] = 3.0
    assert len(flat.grads.tensors[flat.grads.buckets[-1].start]) == 1
    assert flat.grads.buffer[flat.grads.buckets[-1]][0] == 3.0


def test_the_header_of_a_bfloat16_model_follows_the_last_bucket() -> None:
    flat = watched([16, 16], torch.bfloat16)
    assert not flat.header_fits and flat.offset == 0
    assert flat.grads.header.dtype == torch.float32 and flat.grads.buffer.dtype == torch.bfloat16
    flat.grads.header[0] = 1.0009765625  # bfloat16 could not hold it
    backward(flat, [1, 0])
    assert flat.grads.header.tolist() == [1.0009765625, 1.0, 1.0]
    assert all(t is not flat.grads.header for t in flat.grads.tensors[flat.grads.buckets[0].start])
    assert flat.grads.tensors[flat.grads.buckets[-1].start][-1] is flat.grads.header


def test_a_second_gradient_after_the_first_was_sent_is_an_error() -> None:
    flat = watched([16, 16])
    flat.grads.arm(lambda bucket: None)
    flat.params[1].sum().backward()
    with pytest.raises(ShoalError, match="parameter p1 got a second gradient after it was sent"):
        flat.params[1].sum().backward()


def test_a_second_gradient_before_the_bucket_is_sent_is_added() -> None:
    flat = watched([16, 16])
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


# ---- which parts of a model are gathered together -----------------------------------------------


def names(model: nn.Module) -> list[str]:
    return [unit.name for unit in wrap_modules(model, list(model.parameters()))]


def test_blocks_are_units_and_small_modules_join_the_root() -> None:
    with torch.device("meta"):
        model = GPT(Size(layers=12, width=64, heads=2, context=32, lr=1e-3))
    assert names(model) == ["", *(f"blocks.{i}" for i in range(12))]
    root = wrap_modules(model, list(model.parameters()))[0]
    assert {tuple(p.shape) for p in root.params} == {(98, 64), (32, 64), (64,)}


def test_blocks_that_are_large_beside_the_model_are_divided() -> None:
    with torch.device("meta"):
        model = GPT(Size(layers=2, width=64, heads=2, context=32, lr=1e-3))
    found = names(model)
    assert "blocks.0.mlp.up" in found and "blocks.1.attention.qkv" in found


def test_every_parameter_is_in_one_unit() -> None:
    for module in (mlp(), nn.Linear(3, 3), nn.TransformerEncoderLayer(8, 2, 16)):
        units = wrap_modules(module, list(module.parameters()))
        found = [id(p) for unit in units for p in unit.params]
        assert sorted(found) == sorted(id(p) for p in module.parameters())


def test_a_module_with_parameters_of_its_own_is_not_divided() -> None:
    """Attention uses the weight of its output projection outside that module's forward."""
    model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)))
    assert {"0.self_attn", "1.self_attn"} <= set(names(model))


@model(encoder=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)), head=(8, 3))
def two_parts(self: Any, x: Tensor) -> Any:
    return self.head(self.encoder(x))


def test_a_module_that_is_called_by_itself_has_its_parameters(world: World) -> None:
    x = torch.randn(4, 6)

    @torch.no_grad()
    def body(job: Any, step: Any) -> Tensor:
        return step.model.head(step.model.encoder(x))

    for found in on_workers(world, "zero(3)", two_parts, body):
        assert torch.equal(found, two_parts()(x))
