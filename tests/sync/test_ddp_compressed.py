"""Compressed gradients: nothing is lost, replicas stay the same, bytes are as promised."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.replica.flat_params import FlatParams
from shoal.strategy.sync_terms import Ddp
from shoal.sync import plan_for
from shoal.sync.compressed_sum import CompressedSum, ShardedSum, make_compressed_sum
from shoal.train.checkpoints.files import read
from shoal.train.job import Job
from shoal.train.step.step import Step, StepOptions
from tests.conftest import World
from tests.jobs import after_training
from tests.models import Partly, mlp, samples
from tests.sync.compressing import (
    METHODS,
    POWERSGD_FLOATS,
    assert_continued_alike,
    assert_same_bits_and_learning,
    large,
    run,
    start,
)


def sums_of(step: Step) -> CompressedSum:
    found: CompressedSum = step.sync.sums  # type: ignore[attr-defined]
    return found


# ------------------------------------------------------------------------------ sums


@pytest.mark.product
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_what_was_sent_and_what_is_left_make_up_all_gradients(
    world: World, method: str, size: int
) -> None:
    """Over ten steps, in two slices of lengths that the ranks do not divide."""
    models = [mlp() for _ in range(size)]

    def body(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        flat = FlatParams(models[group.rank].named_parameters())
        cut = flat.ranges[2].start
        slices = [slice(cut, flat.size), slice(flat.offset, cut)]
        sums = make_compressed_sum(method, flat, group, slices)
        generator = torch.Generator().manual_seed(group.rank)
        given = torch.zeros(flat.size)
        arrived = torch.zeros(flat.size)
        gaps = flat.gaps()
        for _ in range(10):
            x = torch.randn(flat.size, generator=generator)
            x[gaps] = 0.0
            x[: flat.offset] = 0.0
            given += x
            for at in slices:
                sums.start(x[at], at)
            sums.finish()
            arrived += x
        left = sums.residual.clone()
        if isinstance(sums, ShardedSum):
            for begin, owned in sums.owned.items():
                left[owned] += sums.owed[begin]
        return given, arrived, left

    found = world(size, body)
    for _, arrived, _ in found:
        assert torch.equal(arrived, found[0][1])
    given = torch.stack([g for g, _, _ in found]).sum(0)
    left = torch.stack([r for _, _, r in found]).sum(0)
    torch.testing.assert_close(found[0][1] + left, given, atol=1e-3, rtol=0)


# ------------------------------------------------------------------------------ training


@pytest.mark.whole
@pytest.mark.product
@pytest.mark.parametrize("bucket_mb", ["25", "0.0001"])
@pytest.mark.parametrize("method", METHODS)
def test_replicas_hold_the_same_bits_and_learn(world: World, method: str, bucket_mb: str) -> None:
    text = f'ddp(compress="{method}", bucket_mb={bucket_mb})'
    assert_same_bits_and_learning(world, text)


def test_a_parameter_without_a_gradient_is_left_alone(world: World) -> None:
    def look(job: Job, step: Any, losses: Any) -> Any:
        return step.model

    model, _ = after_training(world, 2, 'ddp(compress="onebit")', look, make=Partly)
    assert torch.equal(model.unused.weight, Partly().unused.weight)
    assert not torch.equal(model.used.weight, Partly().used.weight)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("method", "least", "most"),
    [
        ("fp16", 1.99, 2.01),
        ("bf16", 1.99, 2.01),
        ("int8", 3.85, 4.0),
        ("onebit", 29.5, 32.0),
        ("topk(0.01)", 38.0, 67.0),
        ("powersgd(rank=4)", 12.0, 14.0),
    ],
)
def test_bytes_against_full_precision(
    world: World, size: int, method: str, least: float, most: float
) -> None:
    def look(job: Job, step: Step, losses: Any) -> tuple[dict[str, Any], list[str]]:
        return step.sync.report(), step.sync.summary()

    compressed, summary = after_training(
        world, size, f'ddp(compress="{method}")', look, make=large
    )[0]
    full, _ = after_training(world, size, "ddp", look, make=large)[0]
    assert method != "bf16" or "2.0 times less" in summary[0]
    assert compressed["steps"] == full["steps"] == 3
    assert full["bytes_per_step"] == full["ddp_bytes_per_step"] == compressed["ddp_bytes_per_step"]
    assert least <= full["bytes_sent"] / compressed["bytes_sent"] <= most
    if method.startswith("powersgd"):
        floats = POWERSGD_FLOATS + 7  # the loss and a flag for each parameter
        assert compressed["bytes_per_step"] == pytest.approx(
            2 * 4 * floats * (size - 1) / size, abs=3
        )


@pytest.mark.parametrize(("size", "times"), [(2, 66.7), (4, 40.0), (8, 40.0)])
def test_bytes_of_topk_do_not_grow_with_the_workers(world: World, size: int, times: float) -> None:
    """Each sends 1% of the elements, 4 bytes for each; sums hold up to 4%."""
    data = torch.utils.data.TensorDataset(torch.randn(32, 400), torch.randint(0, 9, (32,)))

    def look(job: Job, step: Step, losses: Any) -> tuple[dict[str, Any], Tensor]:
        return step.sync.report(), step.flat.data.clone()

    make = partial(nn.Linear, 400, 1000)
    found = after_training(world, size, 'ddp(compress="topk(0.01)")', look, make=make, data=data)
    for report, data_of_rank in found:
        ratio = report["ddp_bytes_per_step"] / report["bytes_per_step"]
        assert ratio == pytest.approx(times, rel=0.02)
        assert torch.equal(data_of_rank, found[0][1])


def test_scaled_gradients_are_not_compressed() -> None:
    with pytest.raises(BadInput, match='precision="fp16" exclude each other'):
        plan_for(Ddp(compress="int8")).check(StepOptions(precision="fp16"), 1)


# ------------------------------------------------------------------------------ checkpoints


@pytest.mark.product
@pytest.mark.parametrize("bucket_mb", ["25", "0.0001"])
@pytest.mark.parametrize("method", METHODS)
def test_a_continued_run_has_the_same_bits(
    world: World, tmp_path: Path, method: str, bucket_mb: str
) -> None:
    text = f'ddp(compress="{method}", bucket_mb={bucket_mb})'
    assert_continued_alike(world, text, tmp_path)


@pytest.mark.parametrize("method", METHODS)
def test_other_workers_share_what_was_left_to_send(
    world: World, tmp_path: Path, method: str
) -> None:
    text = f'ddp(compress="{method}")'
    models = [mlp() for _ in range(3)]
    world(2, lambda g: run(g, models[g.rank], text, tmp_path, save_at=3))
    saved = read(tmp_path).optimizer
    names = [name for name, _ in mlp().named_parameters()]

    def joined(key: str) -> Tensor:
        return torch.cat([saved[f"sync0/{name}/gradients:{key}"].view(-1) for name in names])

    residuals = [joined(f"worker:{rank}:residual") for rank in range(2)]
    assert residuals[0].abs().sum() > 0 and not torch.equal(*residuals)

    def body(group: Group) -> dict[str, Tensor]:
        job, step = start(group, text, models[group.rank])
        job.load(tmp_path)
        where = [step.flat.view(i, torch.arange(step.flat.size), 0) for i in range(6)]
        places = torch.cat([place.view(-1) for place in where])
        state = sums_of(step).state()
        return {n: t[places] for n, t in state.items() if len(t) == step.flat.size}

    found = world(3, body)[0]
    loaded = torch.stack([found[f"worker/{r}/residual"] for r in range(3)]).sum(0)
    torch.testing.assert_close(loaded, residuals[0] + residuals[1])
    if "owed" in found:
        assert torch.equal(found["owed"], joined("owed"))


DDP_AND_BACK = [
    ["ddp", 'ddp(compress="int8")', "ddp", 'ddp(compress="topk(0.1)")'],
    ["localsgd(every=2)", "ddp", 'localsgd(every=2, outer="nesterov")'],
]


@pytest.mark.parametrize("texts", DDP_AND_BACK)
def test_a_checkpoint_goes_to_ddp_and_back(world: World, tmp_path: Path, texts: list[str]) -> None:
    def save(job: Job, step: Any, losses: Any) -> int:
        job.save(tmp_path)
        return job.steps

    for i, text in enumerate(texts):
        go_on: Any = {"steps": 3 * (i + 1), "load": tmp_path if i else None}
        found = after_training(
            world, 2, text, save, data=samples(64), batch_size=8, epochs=2, **go_on
        )
        assert found == [3 * (i + 1)] * 2
