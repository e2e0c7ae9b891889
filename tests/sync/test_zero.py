"""zero(1), zero(2), zero(3): the single-device result, with a share of the state on each rank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.conftest import World
from tests.jobs import after_training
from tests.models import mlp, samples
from tests.splitting import assert_equal, gpt, texts
from tests.test_equal import ADAMW, SGD, assert_equal_to_single, assert_same_bits
from tests.test_hybrids import GPT_OPTIONS

STAGES = ["zero(1)", "zero(2)", "zero(3)"]


class Lamb(torch.optim.Optimizer):
    """Steps as long as the parameter: it has to see whole parameters."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.norm() * p.grad / (p.grad.norm() + 1e-3)


class Recomputed(nn.Module):
    """Two blocks whose activations are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 9)
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.head(checkpoint(lambda y: torch.tanh(self.second(y)), x, use_reentrant=False))


class Repeated(nn.Module):
    """One block that is called three times, and a weight that is used outside its module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 9)
        self.again = nn.Linear(9, 9)
        self.third = nn.Linear(9, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.third(x) + (x @ torch.cat([self.third.weight, self.third.weight]).t())[:, :3]


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW, Lamb], ids=["sgd", "adamw", "lamb"])
def test_equals_single_with_clipping_and_accumulation(
    world: World, strategy: str, size: int, optimizer: Any
) -> None:
    options: Any = {"optimizer": optimizer, "accumulate": 2, "clip_norm": 0.1}
    assert_equal_to_single(world, size, strategy, mlp, samples(44), 12, **options)


@pytest.mark.parametrize("strategy", STAGES)
def test_more_ranks_than_parameters(world: World, strategy: str) -> None:
    def two() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(6, 3)

    assert_equal_to_single(world, 4, strategy, two, samples(30), 10, clip_norm=0.1)


@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.parametrize("make", [Recomputed, Repeated])
def test_recomputing_and_sharing(
    world: World, strategy: str, make: Callable[[], nn.Module]
) -> None:
    assert_equal_to_single(world, 3, strategy, make, samples(44), 12, accumulate=2)


@pytest.mark.parametrize("strategy", STAGES)
def test_exact_gives_the_same_bits(world: World, strategy: str) -> None:
    assert_same_bits(world, 3, strategy, 6)


@pytest.mark.parametrize("strategy", STAGES)
def test_a_gpt_with_tied_weights(world: World, strategy: str) -> None:
    assert_equal(world, 2, strategy, gpt, texts(22), **GPT_OPTIONS)


def decayed(pairs: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Groups by kind, as scripts have them; empty ones are left out."""
    pairs = list(pairs)
    groups = [
        {"params": [p for _, p in pairs if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in pairs if p.dim() == 1], "weight_decay": 0.0, "lr": 5e-3},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2, eps=1e-3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_saved_under_zero_loaded_under_ddp_and_back(
    world: World, tmp_path: Path, stage: int
) -> None:
    """Two steps each on 3, 2 and 4 workers are six steps alone, optimizer state included."""
    folder = tmp_path / "saved"

    def go(group: Group, strategy: str, model: nn.Module, until: int) -> dict[str, Tensor]:
        job = Job(parse(strategy), group, device=torch.device("cpu"))
        step = job.step(model, F.cross_entropy, optimizer=decayed, clip_norm=0.5)
        if until > 2 and strategy != "single":
            job.load(folder)
        for batch in job.batches(samples(90), 15, steps=until):
            step(batch)
        if strategy != "single":
            job.save(folder)
        with step.sync.full_weights():
            return {name: t.clone() for name, t in step.model.state_dict().items()}

    alone = go(solo_group(), "single", mlp(), 6)
    for strategy, size, until in [
        (f"zero({stage})", 3, 2),
        ("ddp", 2, 4),
        (f"zero({stage})", 4, 6),
    ]:
        models = [mlp(seed=rank) for rank in range(size)]
        found = world(size, lambda g, s=strategy, u=until, m=models: go(g, s, m[g.rank], u))
    for state in found:
        for name, tensor in alone.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------ memory


def blocks(width: int = 32, layers: int = 16) -> nn.Module:
    """Equal blocks, so that shards and units can be as equal as they get."""
    torch.manual_seed(0)
    inner = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*inner, nn.Linear(width, 3))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Each memory once, whatever looks at it."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def held_by(group: Group, strategy: str, model: nn.Module) -> dict[str, int]:
    """Bytes after a step (parameters, optimizer state) and the most that gradients had."""
    job = Job(parse(strategy), group, device=torch.device("cpu"))
    step = job.step(model, F.cross_entropy, optimizer=ADAMW)
    gradients: list[int] = []
    parameters: list[int] = []

    def look(_: Any) -> None:
        fresh = bytes_of(p.grad for p in step.flat.params if p.grad is not None)
        held = [*step.flat.grads.held(), *step.sync.gradient_tensors()]
        gradients.append(fresh + bytes_of(held))
        parameters.append(_parameter_bytes(step))

    for p in step.flat.params:
        p.register_post_accumulate_grad_hook(look)
    for batch in job.batches(samples(24, (32,)), 12):
        step(batch)
    gc.collect()
    state = [t for s in step.update.optimizer.state.values() for t in s.values()]
    return {
        "parameters": _parameter_bytes(step),
        "most parameters": max(parameters),
        "gradients": max(gradients),
        "optimizer": bytes_of(t for t in state if t.numel() > 1),
    }


def _parameter_bytes(step: Step) -> int:
    return bytes_of(p.data for p in step.flat.params)


@pytest.mark.parametrize("strategy", ["ddp", *STAGES])
def test_each_rank_holds_its_share(
    world: World, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 4 ranks: a quarter where the stage shards, all of it where it does not."""
    monkeypatch.setattr("shoal.schedules.buffer_layout.DEFAULT_BUCKET_BYTES", 4096)  # about a block
    whole = sum(p.nbytes for p in blocks().parameters())
    block = 4 * (32 * 32 + 32)
    models = [blocks() for _ in range(4)]
    for found in world(4, lambda g: held_by(g, strategy, models[g.rank])):
        stage = {"ddp": 0, "zero(1)": 1, "zero(2)": 2, "zero(3)": 3}[strategy]
        quarter = 0.25 * whole + block
        assert found["optimizer"] <= (2 * quarter if stage else 2.1 * whole)
        assert found["parameters"] <= (quarter if stage == 3 else 1.1 * whole)
        assert found["most parameters"] <= (quarter + 4 * block if stage == 3 else 1.1 * whole)
        assert found["parameters"] >= 0.25 * whole - block
        if stage < 2:
            assert found["gradients"] >= whole
        else:
            assert found["gradients"] <= quarter + 4 * block
        if stage < 3:
            assert found["parameters"] >= whole


@pytest.mark.parametrize(
    ("stage", "passes"), [("zero(1)", (2, 2)), ("zero(2)", (2, 2)), ("zero(3)", (2, 3))]
)
def test_all_workers_together_send_what_the_stage_moves(
    world: World, stage: str, passes: tuple[int, int]
) -> None:
    """Gradients to their owners and parameters to the others: p - 1 times each, and the heads.

    zero(3) gathers parameters twice, but for those that backward begins with.
    """

    def look(job: Job, step: Step, losses: Any) -> tuple[float, int, int]:
        job.evaluate(F.cross_entropy, samples(8))  # no part of training
        report = step.sync.report()
        assert report["steps"] == 3
        flat = step.flat
        body_bytes = (flat.size - flat.offset) * flat.dtype.itemsize
        return report["bytes_per_step"], body_bytes, flat.grads.header.nbytes

    found = after_training(world, 3, stage, look, data=samples(36), batch_size=12)
    _, moved, head = found[0]
    least, most = (count * 2 * moved + 2 * 2 * head for count in passes)
    total = sum(each for each, _, _ in found)
    assert least - 3 <= total <= most + 3  # each rank rounds its part of the heads
