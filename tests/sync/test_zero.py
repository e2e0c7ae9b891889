"""zero(1), zero(2), zero(3): the single-device result, with a share of the state on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.replica.fsdp import unit_gather
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.conftest import World
from tests.jobs import after_training
from tests.models import convnet, mlp, samples
from tests.observe.test_memory_estimate import estimated
from tests.splitting import assert_close, assert_equal, gpt, on_workers, texts, trained, whole
from tests.test_equal import ADAMW, SGD, assert_equal_to_single
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


class Reused(nn.Module):
    """Blocks that are computed again in backward, one of them called three times, and a weight
    that is used outside its module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 9)
        self.again = nn.Linear(9, 9)
        self.third = nn.Linear(9, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        for _ in range(3):
            x = checkpoint(lambda y: torch.tanh(self.again(y)), x, use_reentrant=False)
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
def test_recomputing_and_sharing(world: World, strategy: str) -> None:
    assert_equal_to_single(world, 3, strategy, Reused, samples(44), 12, accumulate=2)


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
    after = partial(trained, world, make=mlp, data=samples(64), optimizer=decayed, clip_norm=0.5)
    after(f"zero({stage})", steps=2, size=3, save=folder)
    after("ddp", steps=4, size=2, load=folder, save=folder)
    resumed = after(f"zero({stage})", steps=6, size=4, load=folder)
    assert_close(resumed, after("single", steps=6))


# ------------------------------------------------------------------------------ memory


def blocks() -> nn.Module:
    """Equal blocks, so that shards and units can be as equal as they get."""
    torch.manual_seed(0)
    inner = [m for _ in range(16) for m in (nn.Linear(40, 40), nn.Tanh())]
    return nn.Sequential(*inner, nn.Linear(40, 3))


@pytest.mark.parametrize("stage", range(4))
def test_each_rank_holds_its_share(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 4 ranks: a quarter where the stage shards, all of it where it does not.

    A plan says what a worker holds: tests/observe/test_memory_estimate.py.
    """
    monkeypatch.setattr("shoal.schedules.buffer_layout.DEFAULT_BUCKET_BYTES", 4096)  # about a block
    whole = sum(p.nbytes for p in blocks().parameters())
    block = 4 * (40 * 40 + 40)
    quarter = 0.25 * whole + block
    for found in estimated(4, f"zero({stage})" if stage else "ddp", blocks, ADAMW).memory:
        assert found.optimizer <= (2 * quarter if stage else 2.1 * whole)
        if stage == 3:
            assert 0.25 * whole - block <= found.parameters <= quarter
        else:
            assert whole <= found.parameters <= 1.1 * whole
        assert found.parameters + found.gathered <= quarter + 4 * block or stage < 3
        assert found.gradients >= whole if stage < 2 else found.gradients <= quarter + 4 * block


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


def test_backward_keeps_no_copy_in_fewer_bits_of_a_sharded_weight(world: World) -> None:
    """Under autocast zero(3) makes such copies again from what it gathers."""

    def body(job: Job, step: Any) -> list[torch.Size]:
        kept: list[torch.Size] = []

        def note(tensor: Tensor) -> Tensor:
            kept.append(tensor.shape)
            return tensor

        step.flat.on_saved = note
        step(next(iter(job.batches(samples(8), 8))))
        return kept

    weights = {p.shape for p in mlp().parameters() if p.dim() == 2}
    turned = {torch.Size(reversed(shape)) for shape in weights}
    for kept in on_workers(world, "zero(3)", mlp, body, size=2, precision="bf16"):
        assert kept and not (weights | turned) & set(kept)


@pytest.mark.parametrize("stage", STAGES)
def test_no_memory_for_gradients_is_held_before_backward(world: World, stage: str) -> None:
    """Forward, when activations grow, has none; the owner's is there until the update."""

    def body(job: Job, step: Any) -> list[int]:
        held: list[int] = []

        def looking_loss(outputs: Tensor, targets: Tensor) -> Tensor:
            held.append(len(step.sync.gradient_tensors()))
            return F.cross_entropy(outputs, targets)

        step.engine.loss = looking_loss
        for batch in job.batches(samples(16), 8):
            step(batch)
        return [*held, len(step.sync.gradient_tensors())]

    assert on_workers(world, stage, mlp, body, size=2) == [[0, 0, 0]] * 2


class Mixed(nn.Module):
    """Weights of each kind: cast at every use, taken as they are, both, and computed again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 12)
        self.norm = nn.LayerNorm(12)
        self.inner = nn.Linear(12, 12)
        self.both = nn.Linear(12, 12)
        self.exact = nn.Linear(12, 12)
        self.again = nn.Linear(12, 12)
        self.tied = nn.Linear(12, 7, bias=False)
        self.tied.weight = self.table.weight
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.table((x[:, 0] > 0).long()) + x.repeat(1, 2))
        y = torch.tanh(self.inner(y))
        y = self.both(y) + self.both.weight.sum()
        with torch.autocast("cpu", enabled=False):
            y = self.exact(y.float())
        y = checkpoint(lambda y: torch.tanh(self.again(y)), y, use_reentrant=False)
        out: Tensor = self.last(self.tied(y))
        return out


@pytest.mark.parametrize("make", [Mixed, gpt, convnet, Reused])
@pytest.mark.parametrize("text", ["zero(3)", "zero(3, offload=True)"])
def test_weights_that_are_gathered_in_fewer_bits_change_no_bit(
    world: World, make: Callable[[], nn.Module], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast casts the values that the owner casts before it sends them."""
    options = GPT_OPTIONS if make is gpt else {"optimizer": ADAMW}
    data = texts(24) if make is gpt else samples(24, (1, 4, 4) if make is convnet else (6,))

    def body(job: Job, step: Any) -> tuple[list[float], dict[str, Tensor]]:
        losses = [float(step(batch)) for batch in job.batches(data, 12, steps=3)]
        losses.append(float(job.evaluate(step.engine.loss, data)))
        return losses, whole(step)

    def run() -> list[Any]:
        return on_workers(world, text, make, body, size=3, precision="bf16", **options)

    found = run()
    monkeypatch.setattr(unit_gather, "cast_params", lambda wrapped: [])
    for (losses, weights), (expected_losses, expected) in zip(found, run(), strict=True):
        assert losses == expected_losses
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_weights_of_products_are_gathered_in_half_the_bytes(world: World) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def body(job: Job, step: Any) -> float:
        for batch in job.batches(samples(24, (64,)), 12):
            step(batch)
        return float(step.sync.report()["bytes_per_step"])

    def sent(strategy: str, precision: str) -> float:
        return sum(on_workers(world, strategy, make, body, size=2, precision=precision))

    weights = 4 * 4 * (64 * 64 + 64)
    gradients = sent("zero(2)", "fp32") - weights  # zero(2) moves all weights once
    assert sent("zero(3)", "bf16") - gradients == (sent("zero(3)", "fp32") - gradients) / 2
