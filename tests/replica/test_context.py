"""Context parallelism: sequences of which every rank has some positions train as on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.commands.examples.gpt import GPT, Size, next_token_loss
from shoal.errors import BadInput
from shoal.replica.context.rules import sequence_context
from shoal.replica.context.sequence_shard import SequenceShard, in_full
from shoal.runtime.pytree import tensors_of
from shoal.runtime.trace import SentBytes
from shoal.train.job import Job
from tests.conftest import World
from tests.models import samples
from tests.products import few_or_all
from tests.seeds import seeded
from tests.splitting import GPT_OPTIONS as OPTIONS
from tests.splitting import (
    assert_equal,
    assert_own_loop_equal,
    mlp,
    on_workers,
    refused,
    saved_bytes,
    texts,
    workers,
)

LENGTH = 10
sdpa = F.scaled_dot_product_attention


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


WEIGHT = numbers(6, 6)
TABLE = numbers(LENGTH, 6)
CLASSES = torch.arange(2 * LENGTH).view(2, LENGTH) % 6
IGNORED = CLASSES.where(CLASSES > 1, -100)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
PADDED = CAUSAL & (torch.arange(LENGTH) < 7)


def heads(x: Tensor, number: int = 2) -> Tensor:
    return x.view(x.shape[0], x.shape[1], number, -1).transpose(1, 2)


def written_out(x: Tensor) -> Tensor:
    q = heads(x)
    scores = (q @ q.transpose(-1, -2)).masked_fill(~CAUSAL, -torch.inf)
    return (scores.softmax(-1) @ q).transpose(1, 2).reshape(x.shape)


# each takes x (2, LENGTH, 6); those of the first list never need all positions
LOCAL: dict[str, Callable[[Tensor], Any]] = {
    "linear": lambda x: F.linear(x, WEIGHT).relu() + 1,
    "positions": lambda x: x + TABLE[: x.shape[1]],
    "table": lambda x: x * F.embedding(torch.arange(x.size(1)), TABLE),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "heads": lambda x: heads(x).transpose(1, 2).flatten(2),
    "split": lambda x: torch.cat([b.tanh() for b in x.chunk(3, dim=-1)], -1),
    "rotate": lambda x: torch.cat([-x[..., 3:], x[..., :3]], dim=-1) * TABLE[None],
    "unbind": lambda x: x.view(2, LENGTH, 2, 3).permute(2, 0, 3, 1).unbind()[1],
    "time_first": lambda x: x.transpose(0, 1).softmax(-1),
    "range": lambda x: x[:, 1:-2] * 2,
    "shift": lambda x: x.narrow(1, 0, LENGTH - 1).repeat(1, 1, 1) - TABLE[1:],
    "first": lambda x: x.select(1, 0),
    "last": lambda x: x[:, -1, 2:],
    "new": lambda x: x[:, :, None, :].expand(2, LENGTH, 3, 6),
    "mean": lambda x: x.mean(),
    "pool": lambda x: x.sum(1) / x.shape[1],
    "width": lambda x: x.pow(2).mean(-1, keepdim=True).rsqrt() * x,
    "max": lambda x: x.max(-1).values,
    "in_place": lambda x: (x * 3).mul_(2).add_(TABLE),
    "where": lambda x: torch.where(x > 0, x, x.new_zeros(())),
    "addmm": lambda x: torch.addmm(numbers(6), x.view(-1, 6), WEIGHT).view(x.shape),
    "einsum": lambda x: torch.einsum("btd,de->bte", x, WEIGHT),
    "einsum_sum": lambda x: torch.einsum("btd,bte->bde", x, x.exp()),
    "matmul": lambda x: x @ WEIGHT,
    "sum_product": lambda x: x.transpose(1, 2) @ x,
    "cross_entropy": lambda x: F.cross_entropy(x.flatten(0, 1), CLASSES.flatten()),
    "ignored": lambda x: F.cross_entropy(x.view(-1, 6), IGNORED.view(-1), label_smoothing=0.1),
    "weighted": lambda x: F.cross_entropy(x.transpose(1, 2), IGNORED, weight=numbers(6).abs()),
    "shifted": lambda x: F.cross_entropy(x[:, :-1].reshape(-1, 6), CLASSES[:, 1:].reshape(-1)),
    "unreduced": lambda x: F.cross_entropy(x.view(-1, 6), CLASSES.view(-1), reduction="none"),
    "probabilities": lambda x: F.cross_entropy(x.view(-1, 6), numbers(20, 6).softmax(-1)),
    "mse": lambda x: F.mse_loss(x, numbers(2, LENGTH, 6)),
    "picked": lambda x: x.log_softmax(-1).gather(-1, CLASSES[..., None]),
    "causal": lambda x: sdpa(heads(x), heads(x * 2), heads(x + 1), is_causal=True),
    "attention": lambda x: sdpa(heads(x), heads(x * 2), heads(x + 1)),
    "masked": lambda x: sdpa(heads(x), heads(x * 2), heads(x + 1), attn_mask=PADDED, scale=0.3),
    "added": lambda x: sdpa(heads(x), heads(x), heads(x), attn_mask=numbers(2, 1, LENGTH, LENGTH)),
    "grouped": lambda x: sdpa(
        heads(x), heads(x[..., :3], 1), heads(x[..., 3:], 1), is_causal=True, enable_gqa=True
    ),
    "other_sequence": lambda x: sdpa(heads(x), heads(numbers(2, 7, 6)), heads(numbers(2, 7, 6))),
}
GATHERED: dict[str, Callable[[Tensor], Any]] = {
    "written_out": written_out,
    "cumsum": lambda x: x.cumsum(1),
    "roll": lambda x: x.roll(1, 1) + x,
    "flip": lambda x: x.flip(1) * x,
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), numbers(6, 6, 3), padding=1),
    "softmax": lambda x: x.softmax(1),
    "neighbours": lambda x: x[:, 1:] * x[:, :-1],
    "halves": lambda x: x.view(2, 2, LENGTH // 2, 6).sum(2),
    "norm": lambda x: x.norm(),
    "picked": lambda x: x[:, torch.tensor([3, 1])],
    "learned_mask": lambda x: sdpa(heads(x), heads(x), heads(x), attn_mask=x @ x.transpose(1, 2)),
}


def gradients(f: Callable[[Tensor], Any], x: Tensor, shared: int) -> tuple[list[Tensor], Tensor]:
    """Results of f, and the gradient by x of their weighted sum, which `shared` ranks divide."""
    results = tensors_of(f(x))
    loss = sum((r * numbers(*r.shape)).sum() for r in results)
    assert isinstance(loss, Tensor)
    (loss / shared).backward()
    return results, loss


def check(world: World, size: int, f: Callable[[Tensor], Any]) -> list[set[str]]:
    full = numbers(2, LENGTH, 6).requires_grad_()
    expected, loss = gradients(f, full, 1)

    def body(group: Group) -> set[str]:
        context = sequence_context(group)
        leaf = numbers(2, LENGTH, 6).requires_grad_()
        with torch.no_grad():
            shard = context.shard(leaf, 1)
        x = context.wrap(shard.spec.take_local(leaf, group.rank), shard.spec)
        found, total = gradients(f, x, size)
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(in_full(a).detach(), b.detach())
        torch.testing.assert_close(total.detach(), loss.detach())
        grad = leaf.grad.clone()
        group.all_reduce(grad).wait()
        torch.testing.assert_close(grad, full.grad)
        return context.gathered

    return world(size, body)


@pytest.mark.parametrize("name", LOCAL)
def test_positions_stay_where_they_are(world: World, name: str) -> None:
    assert check(world, 2, LOCAL[name]) == [set()] * 2


@pytest.mark.parametrize("name", GATHERED)
def test_what_mixes_positions_is_computed_in_full(world: World, name: str) -> None:
    check(world, 2, GATHERED[name])


@pytest.mark.parametrize("name", ["causal", "masked", "grouped", "shifted"])
def test_more_ranks_and_uneven_chunks(world: World, name: str) -> None:
    check(world, 3, LOCAL[name])


def test_an_operation_that_gathers_is_reported_once(world: World) -> None:
    assert check(world, 2, lambda x: x.cumsum(1) + x.cumsum(1)) == [{"cumsum"}] * 2


def test_changing_some_positions_in_place_is_refused(world: World) -> None:
    def body(group: Group) -> None:
        x = sequence_context(group).shard(numbers(2, LENGTH, 6), 1)
        with pytest.raises(BadInput, match="in place"):
            x[:, 0] = 0

    world(2, body)


def test_dropout_differs_between_ranks_and_a_common_draw_does_not(world: World) -> None:
    def body(group: Group) -> tuple[list[float], float]:
        x = sequence_context(group).shard(torch.ones(1, 64, 1), 1)
        with seeded(0):
            dropped = F.dropout(x, 0.5)
            assert isinstance(dropped, SequenceShard)
            return dropped.local.flatten().tolist(), float(torch.rand(()))

    (first, common), (second, same) = world(2, body)
    assert first != second and common == same


def test_attention_sends_keys_and_values_of_the_other_blocks(world: World) -> None:
    """Forward K and V of n-1 blocks, backward K, V, dK and dV of n-1 blocks."""

    def body(group: Group) -> tuple[int, int]:
        counter = SentBytes()
        context = sequence_context(group.counted(counter))
        x = context.shard(numbers(2, 16, 6), 1).detach().requires_grad_()
        out = sdpa(heads(x), heads(x), heads(x), is_causal=True)
        forward = counter.total
        assert isinstance(out, SequenceShard)
        out.local.sum().backward()
        return forward, counter.total - forward

    block = 2 * 16 // 4 * 6 * 8
    assert world(4, body) == [(3 * 2 * block, 3 * 4 * block)] * 4


def test_attention_dropout_is_the_same_in_forward_and_backward(world: World) -> None:
    """The derivative along a direction is the change of the result."""

    def attend(group: Group, value: Tensor) -> tuple[Tensor, Tensor]:
        context = sequence_context(group)
        leaf = value.clone().requires_grad_()
        spec = context.shard(value, 1).spec
        torch.manual_seed(5)
        x = heads(context.wrap(spec.take_local(leaf, group.rank), spec))
        return sdpa(x, x, x, dropout_p=0.4).sum(), leaf

    def body(group: Group) -> None:
        middle = numbers(2, LENGTH, 6)
        step = 1e-6 * middle
        loss, leaf = attend(group, middle)
        loss.backward()
        up, down = (attend(group, middle + change)[0] for change in (step, -step))
        change = (up - down).detach() / 2
        torch.testing.assert_close(change, (leaf.grad * step).sum(), rtol=1e-4, atol=0)

    world(1, body)


def test_modules_of_a_transformer(world: World) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True).double()
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    check(world, 2, lambda x: layer(x, src_mask=mask, is_causal=True))


def test_a_tree_of_outputs_is_gathered(world: World) -> None:
    def body(group: Group) -> bool:
        x = sequence_context(group).shard(numbers(2, LENGTH, 6), 1)
        found = in_full({"a": [x + 1], "b": 3})
        return bool(torch.equal(found["a"][0], numbers(2, LENGTH, 6) + 1)) and found["b"] == 3

    assert world(2, body) == [True] * 2


# ---- training -----------------------------------------------------------------------------------

CONTEXT = 24


@seeded(0)
def gpt(context: int = CONTEXT, width: int = 8) -> nn.Module:
    return GPT(Size(2, width, 2, context, 1e-2))


@pytest.mark.parametrize(
    "strategy",
    ["cp(2)", "cp(3)", "ddp + cp(2)", *few_or_all([], ["cp(2) + tp(2)", "pp(2) + cp(2)"])],
)
def test_a_gpt_is_that_of_one_device(world: World, strategy: str) -> None:
    assert_equal(world, workers(strategy), strategy, gpt, texts(10, CONTEXT), 4, **OPTIONS)


def test_a_length_that_does_not_divide_works(world: World) -> None:
    assert_equal(world, 2, "cp(2)", gpt, texts(4, 7), 4, accumulate=2, **OPTIONS)


@pytest.mark.parametrize("strategy", ["cp(2)", *few_or_all([], ["ddp + cp(2)"])])
def test_a_loop_of_the_scripts_own(world: World, strategy: str) -> None:
    data = texts(10, CONTEXT)
    assert_own_loop_equal(world, workers(strategy), strategy, gpt, data, next_token_loss)


def test_activations_are_halved_at_four_times_the_sequence(world: World) -> None:
    data = texts(4, 4 * CONTEXT)
    make = partial(gpt, 4 * CONTEXT, 16)

    def body(job: Job, step: Any) -> int:
        batch = next(iter(job.batches(data, 2)))
        return saved_bytes(step.model, lambda: step(batch))

    (alone,) = on_workers(world, "single", make, body, **OPTIONS)
    for shared in on_workers(world, "cp(2)", make, body, **OPTIONS):
        assert 0.45 < shared / alone < 0.55


def test_what_has_no_sequence_or_divides_it_twice_is_refused(world: World) -> None:
    assert "cp(2) splits sequences" in refused(world, 2, "cp(2)", mlp, samples(8))
    said = refused(world, 4, "tp(2, sequence=True) + cp(2)", gpt, **OPTIONS)
    assert "both divide the positions of a sequence" in said
