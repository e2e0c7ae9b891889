"""One replica's schedule, interpreted."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.call import Call
from shoal.comm.executors.solo import Solo, solo_group
from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.replica.batchnorm import ForwardState
from shoal.replica.engine import Engine, EngineOptions, engine_of_model
from shoal.replica.flat_params import FlatParams
from shoal.replica.microbatch_context import MicroBatch, call_model
from shoal.runtime.trace import Recorder
from shoal.schedules.pipelines import accumulate
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.transport.threads import DoneWork
from shoal.transport.transport import Work
from tests.models import mlp, samples

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


# -------------------------------------------------------------------------- schedule


def test_accumulation_has_one_stage() -> None:
    with pytest.raises(ValueError, match="one stage, not stage 1 of 2"):
        accumulate(2, 1, 4)


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
    assert model.weight.grad is not None
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
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[2048.0, 0.0]]


def test_the_model_can_tell_rows_that_stand_in() -> None:
    forward_state = ForwardState()
    seen: list[bool] = []

    def loss(out: Tensor, target: Tensor) -> Tensor:
        seen.append(forward_state.rows_are_real)
        return F.mse_loss(out, target)

    engine = engine_of(linear(), 2, loss, forward_state=forward_state)
    engine.run([micro([1.0, 0.0], 0.0, real=False), micro([1.0, 0.0], 1.0)], ignore)
    assert seen == [False, True]


def test_forward_and_backward_leave_spans() -> None:
    tracer = Recorder(0, 0)
    engine_of(linear(), 2, tracer=tracer).run([micro([1.0, 0.0], 0.5)] * 2, ignore)
    assert [s.kind for s in tracer.spans] == ["forward", "backward"] * 2


# -------------------------------------------------------------------------- inputs


class Difference(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b


def test_a_tuple_is_spread_over_positions_and_a_dict_over_names() -> None:
    a = torch.tensor(5.0)
    b = torch.tensor(3.0)
    assert call_model(Difference(), (a, b)).item() == 2.0
    assert call_model(Difference(), [b, a]).item() == -2.0
    assert call_model(Difference(), {"b": a, "a": b}).item() == -2.0
    assert call_model(nn.Identity(), a) is a


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


def test_fp16_needs_a_gpu() -> None:
    with pytest.raises(BadInput, match='needs a CUDA GPU; on a CPU take "bf16"'):
        engine_of(linear(), precision="fp16")
    job = Job(parse("single"), solo_group(), device=CPU)
    with pytest.raises(BadInput, match="needs a CUDA GPU"):
        job.step(mlp(), F.cross_entropy, optimizer=SGD, precision="fp16")


def test_an_unknown_precision_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match="one of fp32, bf16, fp16, not 'fp8'"):
        engine_of(linear(), precision="fp8")


def test_bf16_computes_forward_in_bfloat16_and_keeps_parameters_in_float32() -> None:
    model = linear()
    seen = []

    def loss(out: Tensor, target: Tensor) -> Tensor:
        seen.append(out.dtype)
        return F.mse_loss(out.float(), target)

    engine_of(model, loss=loss, precision="bf16").run([micro([1.0, 0.0], 1.0)], ignore)
    assert seen == [torch.bfloat16]
    assert model.weight.dtype == torch.float32
    assert model.weight.grad is not None and model.weight.grad.dtype == torch.float32


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
