"""In double precision rounding vanishes and an error does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from shoal.comm.call import Op, as_reduced
from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.commands.verify import _about_rounding
from shoal.errors import StopTraining
from shoal.observe.capture import Capture
from shoal.observe.double_check import CapturedRun, DoubleCheck, check, check_own
from shoal.observe.double_precision import DoublePrecision
from shoal.observe.verify import judge
from shoal.runtime.config import CaptureConfig
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.conftest import World
from tests.models import mlp, resnet18, samples
from tests.splitting import gpt, texts

STEPS = 2
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-3),
}


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Dataset[Any], Any]] = {
    "mlp": (mlp, samples(32), F.cross_entropy),
    "gpt": (partial(gpt, 1), texts(32), token_loss),
    "resnet18": (partial(resnet18, width=4), samples(32, (3, 16, 16)), F.cross_entropy),
}
Change = Callable[[Step], None]


def scale_last_bucket(step: Step) -> None:
    """The gradients of worker 1 in the bucket that goes out last are wrong by 1e-4."""
    if step.mesh.dp.rank != 1:
        return
    run = step.compute

    def wrong(microbatches: Any, on_bucket: Any) -> Tensor:
        def scaled(bucket: slice) -> None:
            grads = step.flat.grads
            for tensor in grads.tensors[bucket.start] if bucket == grads.buckets[-1] else []:
                tensor.mul_(1 + 1e-4)
            on_bucket(bucket)

        return run(microbatches, scaled)

    step.compute = wrong


def capture(
    group: Group,
    strategy: str,
    models: list[nn.Module],
    kind: tuple[str, str],
    config: CaptureConfig,
    change: Change | None = None,
) -> None:
    assert config.folder is not None
    config.folder.mkdir(exist_ok=True)
    _, data, loss = MODELS[kind[0]]
    job = Job(parse(strategy), group, device=torch.device("cpu"), seed=3)
    recorder = Capture(job, config)
    step = job.step(models[group.rank], loss, optimizer=OPTIMIZERS[kind[1]])
    if change is not None:
        change(step)
    with suppress(StopTraining):
        for batch in job.batches(data, 16):
            step(batch)
    recorder.write()
    job.close()


def never() -> CapturedRun:
    raise AssertionError("there is no need for another run")


def checked(
    world: World, folder: Path, strategy: str, kind: tuple[str, str], change: Change | None = None
) -> tuple[CapturedRun, DoubleCheck]:
    """The run of one worker in float32, and the comparison in double precision."""

    def models() -> list[nn.Module]:
        return [seeded(MODELS[kind[0]][0]) for _ in range(2)]

    def alone(name: str, **options: Any) -> CapturedRun:
        config = CaptureConfig(folder / name, STEPS, **options)
        capture(solo_group(), "single", models(), kind, config)
        return CapturedRun.read(folder / name)

    config = CaptureConfig(folder / "together", STEPS, double=True)
    replicas = models()
    world(2, lambda g: capture(g, strategy, replicas, kind, config, change))
    together = CapturedRun.read(folder / "together")
    narrow = alone("narrow")
    again = never if change is None else partial(alone, "again", double=True, pieces=2)
    return narrow, check(narrow, alone("double", double=True), together, again)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


@pytest.mark.product
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("wrong", [False, True])
def test_a_gradient_bucket_that_is_wrong_by_one_part_in_10000_is_found(
    world: World, tmp_path: Path, model: str, optimizer: str, wrong: bool
) -> None:
    change = scale_last_bucket if wrong else None
    _, found = checked(world, tmp_path, "ddp", (model, optimizer), change)
    assert found.ok is not wrong
    assert found.steps == STEPS
    assert (found.worst.difference < 1e-9) is not wrong


def test_what_rounding_changes_on_one_worker_is_measured(world: World, tmp_path: Path) -> None:
    narrow, found = checked(world, tmp_path, "ddp", ("mlp", "sgd"))
    assert set(found.rounding) == set(narrow.tensors)
    what, rounding = found.largest_rounding
    assert 0 < rounding < 1e-5 and what in narrow.tensors
    assert len(found.loss_rounding) == STEPS
    assert found.to_json()["largest_rounding"] == {"what": what, "difference": rounding}


RUN = CapturedRun(
    losses=[2.0, 1.5],
    tensors={"weight": torch.tensor([1.0, -2.0])},
    additions=64,
    replicas_apart=0.0,
    switched_off=[],
    exact=False,
    start={"weight": torch.tensor([0.5, -1.0])},
    optimizer={"weight/exp_avg": torch.tensor([0.1, 0.2])},
)


def moved(by: float) -> CapturedRun:
    return replace(RUN, tensors={"weight": torch.tensor([1.0, -2.0 + by])})


def test_rounding_that_training_amplifies_is_allowed_if_double_precision_is_equal() -> None:
    equal = check(RUN, RUN, RUN, never)
    verdict = judge(RUN, moved(0.01), never, equal)
    assert verdict.ok and verdict.amplified == ["weight"]
    assert not judge(RUN, moved(0.5), lambda: RUN, equal).ok, "more than 1%"
    assert judge(RUN, moved(0.5), lambda: moved(0.2), equal).ok, "another order moves as much"
    plain = judge(RUN, moved(1e-7), never, equal)
    assert plain.ok and plain.amplified == [] and plain.tensors[0].tolerance < 1e-4


def test_a_difference_in_double_precision_is_an_error_however_small() -> None:
    wrong = replace(RUN, optimizer={"weight/exp_avg": torch.tensor([0.1, 0.2 * (1 + 1e-5)])})
    found = check(RUN, RUN, wrong, lambda: RUN)
    verdict = judge(RUN, RUN, never, found)
    assert not verdict.ok and verdict.is_equal
    assert found.worst.what == "weight/exp_avg of the optimizer"
    assert verdict.to_json()["double"]["ok"] is False


def test_parts_in_float32_are_measured_by_another_order() -> None:
    wrong = replace(RUN, optimizer={"weight/exp_avg": torch.tensor([0.1, 0.2 * (1 + 3e-6)])})
    again = replace(RUN, optimizer={"weight/exp_avg": torch.tensor([0.1, 0.2 * (1 + 1e-6)])})
    found = check(RUN, RUN, wrong, lambda: again)
    assert found.ok and found.was_reordered and found.worst.tolerance < 2e-5


@pytest.mark.parametrize("error", [1e-5, 5e-3])
def test_a_result_that_depends_on_the_order_of_samples_is_never_equal(error: float) -> None:
    wrong = replace(RUN, optimizer={"weight/exp_avg": torch.tensor([0.1, 0.2 * (1 + error)])})
    again = replace(RUN, optimizer={"weight/exp_avg": torch.tensor([0.2, 0.1])})
    found = check(RUN, RUN, wrong, lambda: again)
    assert not found.ok and found.worst.tolerance == 1e-6
    assert found.order is not None and found.order.what == "weight/exp_avg of the optimizer"
    (said,) = (line for line in _about_rounding(judge(RUN, RUN, never, found)) if "cut" in line)
    assert "depends on how its batches are cut: on one worker, weight/exp_avg" in said


def test_a_tensor_that_is_missing_or_nan_is_not_equal() -> None:
    assert not check(RUN, RUN, replace(RUN, tensors={}), lambda: RUN).ok
    assert not check(RUN, RUN, replace(RUN, optimizer={}), lambda: RUN).ok
    assert not check(RUN, RUN, moved(math.nan), lambda: RUN).ok


def test_float32_means_float64_where_a_model_names_it() -> None:
    wide = torch.ones(2, dtype=torch.float64)
    narrow = torch.ones(2)
    with DoublePrecision():
        assert wide.float().dtype == torch.float64
        assert wide.to(torch.float32).dtype == torch.float64
        assert F.softmax(wide, dim=0, dtype=torch.float32).dtype == torch.float64
        assert torch.cat([wide, narrow]).dtype == torch.float64
        assert F.linear(narrow, torch.ones(3, 2, dtype=torch.float64)).dtype == torch.float64
        assert narrow.add_(wide).dtype == torch.float32, "memory keeps its type"
        assert (narrow + narrow).dtype == torch.float32
    assert wide.float().dtype == torch.float32


@pytest.mark.parametrize("a, b", [((12, 8), (2, 8, 4)), ((2, 4, 8), (8, 12)), ((4, 12), (12, 8))])
def test_products_of_groups_run_in_double_precision(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """torch's kernels refuse float64, and experts use them."""
    offs = torch.tensor([4, 8], dtype=torch.int32)
    left = torch.randn(a)
    right = torch.randn(b)
    expected = torch._grouped_mm(left, right, offs=offs)
    with DoublePrecision():
        actual = torch._grouped_mm(left.double(), right.double(), offs=offs)
    assert actual.dtype == torch.float64
    if len(a) != len(b):  # behind the last group there is nothing to compare
        rows = (slice(0, 8),) if len(a) == 2 else (slice(None), slice(0, 8))
        expected = expected[rows]
        actual = actual[rows]
    torch.testing.assert_close(actual.float(), expected, rtol=1e-4, atol=1e-4)


def test_what_is_sent_keeps_its_type_inside_a_forward() -> None:
    """Collectives of tensor parallelism are called there; 11 numbers are no whole float64s."""
    data = torch.ones(11)
    with DoublePrecision():
        numbers, _ = as_reduced(data, Op.SUM)
    assert numbers.dtype == torch.float32


WITH_STEP = replace(
    RUN,
    optimizer={"weight/exp_avg": torch.tensor([0.1, 0.2]), "weight/step": torch.tensor(2.0)},
)


def wrong(by: float) -> CapturedRun:
    state = {"weight/exp_avg": torch.tensor([0.1, 0.2]) * (1 + by)}
    return replace(WITH_STEP, optimizer=WITH_STEP.optimizer | state)


@pytest.mark.parametrize(("error", "ok"), [(0.0, True), (5e-6, True), (1e-4, False)])
def test_an_error_of_one_part_in_10000_is_found_where_rounding_is_smaller(
    error: float, ok: bool
) -> None:
    found = check_own(WITH_STEP, wrong(error), wrong(1e-6))
    assert found.ok is ok
    assert found.least is not None and found.least.what == "weight"
    assert 5e-6 < found.least.tolerance < 2e-5, "ten times what another order changes"
    verdict = replace(judge(WITH_STEP, wrong(error), lambda: WITH_STEP), own=found)
    assert verdict.ok is ok and verdict.to_json()["own_precision"]["ok"] is ok
    assert any("of a gradient above 1e-05 of it" in line for line in _about_rounding(verdict))


def test_what_could_not_have_been_found_is_said() -> None:
    found = check_own(WITH_STEP, wrong(1e-3), wrong(0.05))
    assert found.ok
    verdict = replace(judge(WITH_STEP, WITH_STEP, lambda: WITH_STEP), own=found)
    assert list(_about_rounding(verdict))[-1].startswith("weight is all rounding")


def test_a_missing_tensor_is_not_equal_in_own_precision() -> None:
    assert not check_own(WITH_STEP, replace(WITH_STEP, optimizer={}), WITH_STEP).ok
