"""One replica's schedule, interpreted: gradients, randomness, autograd inside, optimizers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from shoal.comm.executors.solo import solo_group
from shoal.errors import BadInput
from shoal.replica.engine import Engine, EngineOptions
from shoal.replica.flat_params import FlatParams
from shoal.replica.microbatch_context import MicroBatch
from shoal.replica.optimizers import LooksAt, looks_at
from shoal.replica.split.shard import ReplicaShard
from shoal.train.job import Job
from tests.conftest import World
from tests.models import mlp, samples
from tests.seeds import ThreadGenerator
from tests.splitting import SGD, assert_equal, job_of, model, on_workers, refused


def engine_of(
    model: nn.Module, microbatches: int = 1, loss: Any = F.mse_loss, **options: Any
) -> Engine:
    flat = FlatParams(model.named_parameters())
    return ReplicaShard(model).engine(loss, flat, microbatches, EngineOptions(**options))


def ignore(bucket: slice) -> None:
    return None


def linear() -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def micro(x: list[float], weight: Any, **more: Any) -> MicroBatch:
    """One sample of two features; the model of ones predicts their sum, the target is 0."""
    return MicroBatch(torch.tensor([x]), torch.zeros(1, 1), weight, **more)


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


class Noisy(nn.Module):
    """Multiplies by a weight and drops; remembers which masks it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.masks: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        generator = getattr(torch.default_generator, "here", lambda: None)()
        mask = torch.rand(16, generator=generator) < 0.5
        self.masks.append(mask.tolist())
        return (x * self.weight).sum() * mask.float().mean()


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


@pytest.fixture
def masks_by_step(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The masks of each step, in the order of micro-batches over all ranks."""
    monkeypatch.setattr(torch, "default_generator", ThreadGenerator())

    def masks(size: int, exact: bool) -> list[list[list[float]]]:
        options = {"exact": True, "microbatches": 4} if exact else {}

        def body(job: Job, step: Any) -> list[list[list[float]]]:
            found = []
            for batch in job.batches(samples(24, (2,)), 8):
                step(batch)
                found.append(step.model.masks)
                step.model.masks = []
            return found

        by_rank = on_workers(world, "ddp", Noisy, body, size=size, loss=mean_of, **options)
        by_step = zip(*by_rank, strict=True)
        return [[mask for masks in of_ranks for mask in masks] for of_ranks in by_step]

    return masks


@pytest.mark.parametrize("size", [2, 4])
def test_masks_are_the_same_at_any_number_of_workers_when_exact(
    masks_by_step: Callable[..., Any], size: int
) -> None:
    alone = masks_by_step(1, exact=True)
    assert all(len(masks) == 4 for masks in alone)
    assert masks_by_step(size, exact=True) == alone


@pytest.mark.parametrize("exact", [True, False])
def test_masks_differ_between_steps_microbatches_and_ranks(
    masks_by_step: Callable[..., Any], exact: bool
) -> None:
    masks = [mask for step in masks_by_step(2, exact) for mask in step]
    assert len({tuple(mask) for mask in masks}) == len(masks)


@pytest.mark.parametrize("exact", [True, False])
def test_a_resumed_run_draws_the_same_masks(tmp_path: Any, exact: bool) -> None:
    def masks(load: bool) -> list[list[float]]:
        model = Noisy()
        options = {"loss": mean_of, "exact": exact, "microbatches": 2}
        with job_of(solo_group(), "single", model, **options) as (job, step):
            if load:
                job.load(tmp_path)
            for batch in job.batches(samples(40, (2,)), 8):
                step(batch)
                if job.steps == 2 and not load:
                    job.save(tmp_path)
                    model.masks.clear()
        return model.masks

    whole, resumed = map(masks, (False, True))  # one call: a loop is known by where it is called
    assert whole == resumed != []


def test_two_models_of_one_script_draw_different_masks() -> None:
    models = [Noisy(), Noisy()]
    with job_of(solo_group(), "single", models[0], loss=mean_of) as (job, step):
        for each in (step, job.step(models[1], mean_of, optimizer=SGD)):
            each((torch.ones(4), torch.ones(4)))
    assert models[0].masks != models[1].masks


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


class Renamed(torch.optim.SGD):
    """Updates as SGD does."""


class Own(torch.optim.SGD):
    """Its update is not known."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Elementwise(Own):
    looks_at = "element"


class ByGlobalNorm(Own):
    looks_at = "model"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (torch.optim.Adam, LooksAt.ELEMENT),
        (Renamed, LooksAt.ELEMENT),
        (Elementwise, LooksAt.ELEMENT),
        (torch.optim.Adafactor, LooksAt.PARAMETER),
        (torch.optim.Muon, LooksAt.PARAMETER),
        (Own, None),
        (ByGlobalNorm, LooksAt.MODEL),
    ],
)
def test_a_class_is_known_or_says_what_it_looks_at(kind: Any, expected: LooksAt | None) -> None:
    assert looks_at(kind([nn.Parameter(torch.ones(4, 4))], lr=0.1)) is expected


@pytest.mark.parametrize(
    ("strategy", "kind", "sentence"),
    [
        ("tp(2)", torch.optim.Adafactor, "Adafactor .*take ddp"),
        ("tp(2)", Own, "Own.looks_at = "),
        ("zero(2)", ByGlobalNorm, "ByGlobalNorm .*take ddp"),
        ("pp(2)", ByGlobalNorm, "ByGlobalNorm .*take ddp"),
    ],
)
def test_no_strategy_gives_an_optimizer_less_than_it_looks_at(
    world: World, strategy: str, kind: Any, sentence: str
) -> None:
    assert re.search(sentence, refused(world, 2, strategy, mlp, optimizer=partial(kind, lr=0.1)))


def test_an_optimizer_of_whole_parameters_trains_under_zero(world: World) -> None:
    adafactor = partial(torch.optim.Adafactor, lr=0.1)
    assert_equal(world, 2, "zero(2)", mlp, samples(30), 10, optimizer=adafactor)


def test_one_that_is_not_known_is_named_where_workers_have_some_parameters(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    on_workers(world, "zero(2)", mlp, lambda job, step: None, optimizer=partial(Own, lr=0.1))
    assert capfd.readouterr().err.count('Own.looks_at = "model"') == 1
