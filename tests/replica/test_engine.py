"""One replica's schedule, interpreted."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from shoal.comm.call import Call
from shoal.comm.executors.solo import Solo, solo_group
from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.replica.engine import Engine, EngineOptions, engine_of_model
from shoal.replica.flat_params import FlatParams
from shoal.replica.microbatch_context import MicroBatch
from shoal.schedules.pipelines import accumulate
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.transport.threads import DoneWork
from shoal.transport.transport import Work
from tests.conftest import World
from tests.models import samples
from tests.splitting import assert_equal, model

CPU = torch.device("cpu")
SGD = partial(torch.optim.SGD, lr=0.1)


def engine_of(
    model: nn.Module, microbatches: int = 1, loss: Any = F.mse_loss, **options: Any
) -> Engine:
    flat = FlatParams(model.named_parameters())
    actions = accumulate(1, 0, microbatches)
    return engine_of_model(model, loss, flat, actions, EngineOptions(**options))


def ignore(bucket: slice) -> None:
    return None


# -------------------------------------------------------------------------- gradients


def linear() -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def micro(x: list[float], weight: Any, **more: Any) -> MicroBatch:
    """One sample of two features; the model of ones predicts their sum, the target is 0."""
    return MicroBatch(torch.tensor([x]), torch.zeros(1, 1), weight, **more)


def test_gradients_and_the_loss_are_sums_by_weight() -> None:
    """The loss is (x·w)², its gradient 2(x·w)x: 1 and 16, (2, 0) and (8, 24)."""
    model = linear()
    engine = engine_of(model, 2)
    loss = engine.run([micro([1.0, 0.0], 0.75), micro([1.0, 3.0], 0.25)], ignore)
    assert loss.item() == 0.75 * 1 + 0.25 * 16
    assert model.weight.grad.tolist() == [[0.75 * 2 + 0.25 * 8, 0.25 * 24]]


def test_a_weight_may_be_a_function_that_is_asked_after_forward() -> None:
    events: list[str] = []

    def loss(out: Tensor, target: Tensor) -> Tensor:
        events.append("forward")
        return F.mse_loss(out, target)

    def weight() -> Tensor:
        events.append("weight")
        return torch.tensor(0.5, dtype=torch.float64)

    engine = engine_of(linear(), loss=loss)
    assert engine.run([micro([1.0, 3.0], weight)], ignore).item() == 8.0
    assert events == ["forward", "weight"]


@pytest.mark.parametrize(
    ("every", "losses", "gradients"),
    [(False, [0.5 * 1 + 0.5 * 16], [[5.0, 12.0]]), (True, [0.5, 8.0], [[1.0, 0.0], [4.0, 12.0]])],
)
def test_buckets_are_reported_in_the_last_microbatch_or_in_each(
    every: bool, losses: list[float], gradients: list[list[float]]
) -> None:
    engine = engine_of(linear(), 2, every_microbatch=every)
    engine.flat.grads.watch(engine.flat.buckets(1 << 20))
    seen: list[list[float]] = []
    engine.run(
        [micro([1.0, 0.0], 0.5), micro([1.0, 3.0], 0.5)],
        lambda bucket: seen.append(engine.flat.grads.buffer[bucket].tolist()),
    )
    assert [b[:2] for b in seen] == [[loss, 1.0] for loss in losses], "and flags of the weight"
    assert [b[16:18] for b in seen] == gradients


def test_the_scale_of_a_loss_multiplies_gradients_and_not_the_loss() -> None:
    model = linear()
    engine = engine_of(model, loss_scale=lambda weight: weight * 1024)
    assert engine.run([micro([1.0, 0.0], 1.0)], ignore).item() == 1.0
    assert model.weight.grad.tolist() == [[2048.0, 0.0]]


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (partial(F.mse_loss, reduction="none"), r"\(1, 1\)"),
        (lambda out, target: [1.0], "list"),
        (lambda out, target: 1.0, "float"),
    ],
    ids=["a tensor", "a list", "a float"],
)
def test_a_loss_that_is_no_single_number_is_refused(loss: Any, what: str) -> None:
    with pytest.raises(BadInput, match=f"has to return one number.*returned {what}"):
        engine_of(linear(), loss=loss).run([micro([1.0, 0.0], 1.0)], ignore)


@pytest.mark.parametrize(
    ("precision", "said"),
    [
        ("fp16", 'needs a CUDA GPU; on a CPU take "bf16"'),
        ("fp8", "one of fp32, bf16, fp16, not 'fp8'"),
    ],
)
def test_a_precision_that_there_is_not_is_refused(precision: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        engine_of(linear(), precision=precision)


def test_bf16_computes_forward_in_bfloat16_and_keeps_parameters_in_float32() -> None:
    model = linear()
    seen = []

    def loss(out: Tensor, target: Tensor) -> Tensor:
        seen.append(out.dtype)
        return F.mse_loss(out.float(), target)

    engine_of(model, loss=loss, precision="bf16").run([micro([1.0, 0.0], 1.0)], ignore)
    assert seen == [torch.bfloat16]
    assert model.weight.dtype == torch.float32
    assert model.weight.grad.dtype == torch.float32


# -------------------------------------------------------------------------- randomness


class Noisy(nn.Module):
    """Multiplies by a weight and drops; remembers which masks it drew."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.p = p
        self.masks: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones(16), self.p, training=self.training)
        self.masks.append(mask.tolist())
        return (x * self.weight).sum() * mask.mean()


def mean_of(out: Tensor, target: Tensor) -> Tensor:
    return out.mean()


def noise(seeds: list[int]) -> list[MicroBatch]:
    return [MicroBatch(torch.ones(1), None, 0.5, seed=seed) for seed in seeds]


def test_a_step_with_dropout_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    engine = engine_of(Noisy(), 2, mean_of)
    torch.manual_seed(0)
    got = []
    for step in range(3):
        engine.run(noise([step, 10 + step]), ignore)
        got.append(torch.rand(1))
    assert torch.equal(torch.cat(got), wanted)


def test_a_step_that_fails_leaves_the_global_random_state_alone() -> None:
    engine = engine_of(Noisy(), loss=lambda out, target: out.reshape(1))
    before = torch.get_rng_state()
    with pytest.raises(BadInput):
        engine.run(noise([1]), ignore)
    assert torch.equal(torch.get_rng_state(), before)


def test_masks_are_those_of_the_microbatch_seed() -> None:
    model = Noisy()
    engine = engine_of(model, 2, mean_of)
    for seeds in ([1, 2], [2, 1], [1, 2]):
        torch.rand(5)
        engine.run(noise(seeds), ignore)
    one, two = model.masks[:2]
    assert one != two
    assert model.masks == [one, two, two, one, one, two]


class LonelyRank(Solo):
    """One rank of a world whose other ranks contribute what it contributes, or nothing.

    Ranks of a world of threads share one global random state, so masks are seen rank by rank.
    """

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size

    def submit(self, call: Call) -> Work:
        if call.kind == "all_gather":
            assert isinstance(call.data, Tensor) and isinstance(call.out, Tensor)
            repeated = call.data.expand(self.size, *call.data.shape)
            call.out.copy_(repeated.reshape(call.out.shape))
        return DoneWork()


def masks_by_step(size: int, exact: bool, steps: int = 3) -> list[list[list[float]]]:
    """The masks of each step, in the order of micro-batches over all ranks."""
    found: list[list[list[float]]] = [[] for _ in range(steps)]
    for rank in range(size):
        group = Group(LonelyRank(rank, size))
        job = Job(parse("ddp"), group, device=CPU, seed=4)
        model = Noisy()
        options: dict[str, Any] = {"exact": True, "microbatches": 4} if exact else {}
        step = job.step(model, mean_of, optimizer=SGD, **options)
        for n, batch in enumerate(job.batches(samples(8 * steps, (2,)), 8)):
            step(batch)
            found[n] += model.masks
            model.masks = []
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_masks_are_the_same_at_any_number_of_workers_when_exact(size: int) -> None:
    alone = masks_by_step(1, exact=True)
    assert all(len(masks) == 4 for masks in alone)
    assert masks_by_step(size, exact=True) == alone


def test_masks_differ_between_steps_microbatches_and_ranks() -> None:
    for exact in (True, False):
        masks = [mask for step in masks_by_step(2, exact) for mask in step]
        assert len({tuple(mask) for mask in masks}) == len(masks)


@pytest.mark.parametrize("exact", [True, False])
def test_a_resumed_run_draws_the_same_masks(tmp_path: Any, exact: bool) -> None:
    def start() -> tuple[Job, Any, Noisy]:
        job = Job(parse("single"), solo_group(), device=CPU, seed=4)
        model = Noisy()
        return job, job.step(model, mean_of, optimizer=SGD, exact=exact, microbatches=2), model

    data = samples(40, (2,))
    job, step, model = start()
    for batch in job.batches(data, 8):
        step(batch)
        if job.steps == 2:
            job.save(tmp_path)
            seen = len(model.masks)
    again, step_again, model_again = start()
    again.load(tmp_path)
    for batch in again.batches(data, 8):
        step_again(batch)
    assert len(model_again.masks) == (6 if exact else 3)
    assert model_again.masks == model.masks[seen:]


def test_two_models_of_one_script_draw_different_masks() -> None:
    job = Job(parse("single"), solo_group(), device=CPU)
    first = Noisy()
    second = Noisy()
    steps = [job.step(m, mean_of, optimizer=SGD) for m in (first, second)]
    for step in steps:
        step((torch.ones(4), torch.ones(4)))
    assert first.masks != second.masks


# -------------------------------------------------------------------------- autograd in forward


@model(
    critic=lambda: nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh()),
        *(nn.Linear(8, 7), nn.BatchNorm1d(7, affine=False), nn.Tanh(), nn.Linear(7, 3)),
    )
)
def penalized(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A critic with BatchNorm whose forward returns its outputs and a gradient penalty."""
    x = x.detach().requires_grad_()
    out = self.critic(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out, slope.square().sum(1)


@model(inner=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
def per_sample(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients by sample, with torch.func, without BatchNorm."""
    params = dict(self.inner.named_parameters())

    def out(row: Tensor) -> Tensor:
        return functional_call(self.inner, params, (row,))

    return vmap(out)(x), vmap(grad(lambda row: out(row).square().sum()))(x).square().sum(1)


class Normed(nn.Module):
    """Weight norm, spectral norm, a shared and a frozen layer, and hooks of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = parametrizations.weight_norm(nn.Linear(6, 8))
        self.second = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.shared = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 3)
        self.head.register_forward_hook(lambda module, inputs, output: output * 2)
        self.shared.weight.register_hook(lambda g: g * 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        x = self.shared(torch.tanh(self.frozen(self.shared(x))))
        if x.requires_grad:
            x.register_hook(lambda g: g * 3)
        return self.head(x), x.square().mean(1)


def loss(outputs: Any, targets: Tensor) -> Tensor:
    out, penalty = outputs
    return F.cross_entropy(out, targets) + 0.5 * penalty.mean()


STRATEGIES = [
    *("ddp", "zero(1)", "zero(2)", "zero(3)"),
    *('ps(placement="rank0")', 'gossip(graph="complete")'),
]


@pytest.mark.product
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("make", [penalized, per_sample, Normed])
def test_derivatives_inside_forward(world: World, make: Any, strategy: str) -> None:
    if make is per_sample and strategy == "zero(3)":
        with pytest.raises(BadInput, match=r"torch\.func\.grad.*zero\(2\)"):
            assert_equal(world, 2, strategy, make, samples(22), loss=loss)
    else:
        assert_equal(world, 2, strategy, make, samples(22), loss=loss)


def test_a_penalty_where_a_replica_has_no_rows(world: World) -> None:
    """The last batch has 2 rows for 3 replicas."""
    assert_equal(world, 3, "ddp", penalized, samples(18), loss=loss)
