"""In double precision rounding vanishes and an error does not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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
from shoal.errors import StopTraining
from shoal.observe.capture import Capture, DoublePrecision
from shoal.observe.double_check import CapturedRun, DoubleCheck, check
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
Kind = tuple[Callable[[], nn.Module], Dataset[Any], Any, Any]  # model, data, loss, optimizer
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
    kind: Kind,
    config: CaptureConfig,
    change: Change | None = None,
) -> None:
    assert config.folder is not None
    config.folder.mkdir(exist_ok=True)
    _, data, loss, optimizer = kind
    job = Job(parse(strategy), group, device=torch.device("cpu"), seed=3)
    recorder = Capture(job, config)
    step = job.step(models[group.rank], loss, optimizer=optimizer)
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
    world: World, folder: Path, strategy: str, kind: Kind, change: Change | None = None
) -> tuple[CapturedRun, DoubleCheck]:
    """The run of one worker in float32, and the comparison in double precision."""

    def models() -> list[nn.Module]:
        return [seeded(kind[0]) for _ in range(2)]

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
    _, found = checked(world, tmp_path, "ddp", (*MODELS[model], OPTIMIZERS[optimizer]), change)
    assert found.ok is not wrong
    assert found.steps == STEPS
    assert (found.worst.difference < 1e-9) is not wrong


def test_what_rounding_changes_on_one_worker_is_measured(world: World, tmp_path: Path) -> None:
    narrow, found = checked(world, tmp_path, "ddp", (*MODELS["mlp"], OPTIMIZERS["sgd"]))
    assert set(found.rounding) == set(narrow.tensors)
    what, rounding = found.largest_rounding
    assert 0 < rounding < 1e-5 and what in narrow.tensors
    assert len(found.loss_rounding) == STEPS
    assert found.to_json()["largest_rounding"] == {"what": what, "difference": rounding}


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
