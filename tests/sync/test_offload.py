"""zero(…, offload=True): optimizer state, gradients and parameters in the host's memory.

On a CPU the same code runs, with copies inside of one memory; for a GPU see tests/gpu.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from shoal.errors import BadInput, StrategyError
from shoal.strategy.strategy import parse
from shoal.sync import Sync
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.conftest import World
from tests.jobs import CPU, after_training
from tests.models import mlp, samples
from tests.splitting import assert_close, assert_equal, gpt, on_workers, texts, trained
from tests.sync.test_zero import Lamb, Reused, decayed
from tests.test_equal import ADAMW, SGD, assert_equal_to_single
from tests.test_hybrids import GPT_OPTIONS

STAGES = (1, 2, 3)


class Counting(torch.optim.Optimizer):
    """Counts steps in its group, and has state from the start, as ScheduleFree and Adagrad have."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr, "k": 0})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, 0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    total = self.state[p]["sum"] + p.grad.square()
                    self.state[p]["sum"] = total  # another tensor than before
                    p -= group["lr"] / group["k"] * p.grad / total.sqrt()


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard of these small models is several buckets, and as many chunks."""
    monkeypatch.setattr("shoal.schedules.buffer_layout._SMALLEST_BUCKET_BYTES", 256)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW, Lamb, Counting], ids=lambda o: str(o)[-9:-2])
def test_equals_single(world: World, stage: int, size: int, optimizer: Any) -> None:
    options: Any = {"optimizer": optimizer, "accumulate": 2, "clip_norm": 0.1}
    strategy = f"zero({stage}, offload=True)"
    assert_equal_to_single(world, size, strategy, mlp, samples(44), 12, **options)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_has_the_bits_of_the_same_run_without_offload(
    world: World, stage: int, precision: str
) -> None:
    """The device updates by the same kernels, from gradients that were added in the same order."""
    options: Any = {"precision": precision, "accumulate": 2, **GPT_OPTIONS}

    def after(strategy: str) -> Any:
        return on_workers(world, strategy, gpt, train, size=2, **options)

    def train(job: Job, step: Any) -> list[torch.Tensor]:
        for batch in job.batches(texts(22), 12):
            step(batch)
        return weights(step.sync, step.model)

    for offloaded, plain in zip(
        after(f"zero({stage}, offload=True)"),
        after(f"zero({stage}, shared_weights=False)"),
        strict=True,
    ):
        assert all(map(torch.equal, offloaded, plain))


def weights(sync: Sync, model: nn.Module) -> list[torch.Tensor]:
    with sync.full_weights():
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("stage", STAGES)
def test_recomputed_shared_and_exact(world: World, stage: int) -> None:
    strategy = f"zero({stage}, offload=True)"
    assert_equal_to_single(world, 3, strategy, Reused, samples(44), 12, accumulate=2)
    assert_equal_to_single(world, 3, strategy, mlp, samples(44), 12, exact=True, microbatches=6)


@pytest.mark.parametrize("stage", STAGES)
def test_saved_with_offload_loaded_without_and_back(
    world: World, tmp_path: Path, stage: int
) -> None:
    folder = tmp_path / "saved"
    after = partial(trained, world, make=mlp, data=samples(64), optimizer=decayed, clip_norm=0.5)
    after(f"zero({stage}, offload=True)", steps=2, size=3, save=folder)
    after("ddp", steps=4, size=2, load=folder, save=folder)
    resumed = after(f"zero({stage}, offload=True)", steps=6, size=2, load=folder)
    assert_close(resumed, after("single", steps=6))


@pytest.mark.parametrize("stage", STAGES)
def test_evaluates_and_averages(world: World, stage: int) -> None:
    def look(job: Job, step: Step, losses: Any) -> list[float]:
        return [float(job.evaluate(F.cross_entropy, samples(12))) for _ in range(2)]

    found = after_training(world, 2, f"zero({stage}, offload=True)", look)
    expected = after_training(world, 1, "single", look)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_loop_of_the_users_own(world: World, stage: int, size: int) -> None:
    """Its gradients are at the parameters, where the script clips them."""

    def loop(group: Any, strategy: str) -> list[torch.Tensor]:
        model = mlp()
        job = Job(parse(strategy), group, device=CPU, seed=3)
        optimizer: Any = ADAMW(model.parameters())
        model, optimizer = job.setup(model, optimizer)
        for x, y in job.batches(samples(36), 12):
            optimizer.zero_grad()
            job.backward(F.cross_entropy(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        found = weights(job._loop.parts[0].sync, model)
        job.close()
        return found

    alone = loop(solo_group(), "single")
    for together in world(size, lambda group: loop(group, f"zero({stage}, offload=True)")):
        torch.testing.assert_close(together, alone)


def test_between_steps_the_state_is_in_the_hosts_memory(world: World) -> None:
    def look(job: Job, step: Step, losses: Any) -> None:
        held = step.sync.host_tensors()
        addresses = {t.untyped_storage().data_ptr() for t in held}
        for p in step.update.params:
            assert p.grad is None
            for key in ("exp_avg", "exp_avg_sq"):
                state = step.update.optimizer.state[p][key]
                assert state.untyped_storage().data_ptr() in addresses
        flat: Any = step.flat
        assert flat.shard_data.untyped_storage().data_ptr() in addresses
        assert not any(memory.nbytes for memory in flat.gathered())

    after_training(world, 2, "zero(3, offload=True)", look, optimizer=ADAMW)


@pytest.mark.parametrize("optimizer", [False, True])
def test_weights_to_be_saved_are_gathered_in_the_hosts_memory(
    world: World, optimizer: bool
) -> None:
    def look(job: Job, step: Step, losses: Any) -> None:
        step.flat.device = torch.device("meta")  # as if there were a device without room
        with step.sync.full_weights(optimizer):
            assert job.rank or all(p.is_cpu for p in step.model.parameters())

    after_training(world, 2, "zero(3, offload=True)", look)


def test_what_does_not_go_with_it(world: World) -> None:
    for text in (
        "zero(2, offload=True, elastic=True)",
        "zero(1, offload=True, shared_weights=True)",
    ):
        with pytest.raises(StrategyError, match="exclude each other"):
            parse(text)
    with pytest.raises(BadInput, match=r'on_nan="skip" needs all gradients .* zero\(offload'):
        after_training(world, 1, "zero(2, offload=True)", on_nan="skip")
    with pytest.raises(BadInput, match=r"clip_norm of a split model .* zero\(offload=True\)"):
        on_workers(
            world, "zero(2, offload=True) + tp(2)", gpt, lambda job, step: None, **GPT_OPTIONS
        )


@pytest.mark.parametrize("split", ["tp(2)", "pp(2)"])
@pytest.mark.parametrize("stage", STAGES)
def test_of_a_model_that_is_split(world: World, stage: int, split: str) -> None:
    options = {**GPT_OPTIONS, "clip_norm": 0.5 if stage == 1 else None}
    assert_equal(world, 4, f"zero({stage}, offload=True) + {split}", gpt, texts(22), **options)
