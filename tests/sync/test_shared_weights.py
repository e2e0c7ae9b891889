"""ddp with shared weights: one copy of the weights a host, each worker updates a slice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.replica import peer_sum
from shoal.sync.ddp import DdpSync
from shoal.sync.shared_weights import SharedWeights
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.comm.threads import on_hosts
from tests.conftest import World
from tests.jobs import after_training
from tests.models import samples
from tests.scripts import shoal
from tests.splitting import GPT_OPTIONS, assert_same, gpt, job_of, on_workers, texts, train, whole

SHARED = "ddp(shared_weights=True)"
Between = Callable[[Job, Step], None]


class Net(nn.Module):
    """With tied weights, a frozen one, and one that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16)
        self.again = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.again.weight
        self.unused = nn.Parameter(torch.ones(5))
        self.last = nn.Linear(16, 3)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.tied(self.again(self.first(x).tanh()).tanh()).tanh())


def by_dimension(named: Any, kind: Any, **options: Any) -> torch.optim.Optimizer:
    """Weight decay for matrices alone, as people do it."""
    params = [p for _, p in named]
    groups = [{"params": [p for p in params if (p.dim() > 1) is d]} for d in (True, False)]
    groups[1]["weight_decay"] = 0.0
    return kind(groups, **options)


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": partial(by_dimension, kind=torch.optim.AdamW, lr=0.01, weight_decay=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
}


def trained(
    world: World, size: int, strategy: str, between: Between = lambda job, step: None, **more: Any
) -> Any:
    """The sync, losses and weights after training; `between` is called before a later step."""

    def go_on(job: Job, step: Step, losses: list[float]) -> Any:
        for batch in job.batches(_data(), 16, steps=8):
            between(job, step)
            losses.append(float(step(batch)))
        return type(step.sync), losses, [p.detach().clone() for p in step.model.parameters()]

    return after_training(world, size, strategy, go_on, make=Net, **more)


def _data() -> Any:
    return samples(48)


def assert_alike(found: Any, expected: Any) -> None:
    for (_, losses, weights), (_, expected_losses, expected_weights) in zip(
        found, expected, strict=True
    ):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses))
        torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 3])
def test_equals_ddp(world: World, size: int, optimizer: str) -> None:
    options = {"optimizer": OPTIMIZERS[optimizer], "clip_norm": 0.5}
    found = trained(world, size, SHARED, **options)
    assert {kind for kind, *_ in found} == {SharedWeights}
    assert_alike(found, trained(world, size, "ddp", **options))


def clip_weights(job: Job, step: Step) -> None:
    for p in step.model.parameters():
        p.data.clamp_(-0.3, 0.3)


def decay(job: Job, step: Step) -> None:
    with torch.no_grad():
        for p in step.model.parameters():
            p.mul_(0.9)


def look_with_others_on_rank_0(job: Job, step: Step) -> None:
    """An average is evaluated with, and the weights come back."""
    if job.rank:
        return
    weights = {name: value.clone() for name, value in step.model.state_dict().items()}
    step.model.load_state_dict({name: torch.zeros_like(v) for name, v in weights.items()})
    step.model.load_state_dict(weights)


@pytest.mark.parametrize("between", [clip_weights, decay, look_with_others_on_rank_0])
def test_what_a_script_writes_between_steps_counts_as_under_ddp(
    world: World, between: Between
) -> None:
    options = {"optimizer": OPTIMIZERS["adamw"]}
    found = trained(world, 2, SHARED, between, **options)
    assert_alike(found, trained(world, 2, "ddp", between, **options))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("saves", "loads"), [(SHARED, "ddp"), ("ddp", SHARED), (SHARED, SHARED)])
def test_a_checkpoint_of_one_goes_on_under_the_other(
    world: World, tmp_path: Path, saves: str, loads: str, optimizer: str
) -> None:
    options = {"make": Net, "optimizer": OPTIMIZERS[optimizer]}

    def save(job: Job, step: Step, losses: list[float]) -> list[float]:
        job.save(tmp_path)
        return [*losses, *(float(step(batch)) for batch in job.batches(_data(), 16))]

    through = after_training(world, 2, saves, save, **options)
    again = after_training(world, 2, loads, load=tmp_path, epochs=2, **options)
    for losses, second in zip(through, again, strict=True):
        assert losses[-len(second) :] == pytest.approx(second, rel=1e-4)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("ddp", SharedWeights),
        ("ddp(shared_weights=False)", DdpSync),
        ('ddp(algorithm="ring")', DdpSync),
    ],
)
def test_a_large_model_is_shared_unless_the_strategy_says_otherwise(
    world: World, strategy: str, kind: type
) -> None:
    kinds = after_training(
        world,
        2,
        strategy,
        lambda job, step, losses: type(step.sync),
        make=lambda: nn.Sequential(nn.Linear(6, 4 << 10), nn.Linear(4 << 10, 600)),
    )
    assert set(kinds) == {kind}


def test_ranks_that_cannot_read_each_other_exchange_gradients(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_sum, "_native", None)
    found = trained(world, 2, SHARED)
    assert {kind for kind, *_ in found} == {DdpSync}


@pytest.mark.whole
def test_a_killed_worker_ends_the_run_with_its_name(tmp_path: Path) -> None:
    words = ["run", "-n", "3", "-s", SHARED, "--kill", "1@10", "digits", "--out", "saved"]
    done = shoal(*words, "--epochs", "2", cwd=tmp_path)
    assert done.returncode == 1
    assert "worker 1" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_optimizer_that_looks_at_whole_parameters_updates_them_everywhere(world: World) -> None:
    kinds = after_training(
        world,
        2,
        SHARED,
        lambda job, step, losses: type(step.sync),
        make=lambda: nn.Linear(6, 3, bias=False),
        optimizer=partial(torch.optim.Adafactor, lr=0.01),
    )
    assert set(kinds) == {DdpSync}


@pytest.mark.parametrize(
    "strategy",
    [
        *("zero(1, shared_weights=True)", "zero(2, shared_weights=True)"),
        "gossip(graph='complete', shared_weights=True)",
        "mapreduce(batch='mini', shared_weights=True)",
        *(f"{SHARED} + pp(2)", f"{SHARED} + tp(2)", f"{SHARED} + cp(2)"),
        "zero(1, shared_weights=True) + pp(2)",
    ],
)
def test_the_same_mechanism_is_behind(world: World, strategy: str) -> None:
    def look(job: Job, step: Step) -> Any:
        own = sum(len(s["exp_avg"]) for s in step.sync.optimizers()[0].state.values())
        return type(step.sync), own, sum(p.numel() for p in step.flat.params)

    def go(job: Job, step: Step) -> Any:
        for batch in job.batches(texts(8), 8):
            step(batch)
        return look(job, step)

    found = on_workers(world, strategy, gpt, go, **GPT_OPTIONS, size=4)
    assert {kind for kind, *_ in found} == {SharedWeights}
    replicas = 2 if "+" in strategy else 4
    for _, own, numel in found:  # elements of the optimizer's state, and of the parameters here
        assert own <= numel // replicas + 64


HOSTS = [("abab", SHARED), ("aabb", "zero(1, shared_weights=True)")]


@pytest.mark.parametrize(("hosts", "strategy"), HOSTS)
def test_several_hosts_keep_a_copy_each_and_exchange_slices(hosts: str, strategy: str) -> None:
    options: dict[str, Any] = {"optimizer": OPTIMIZERS["adamw"], "clip_norm": 0.5}
    alone = train(solo_group(), "single", Net(), _data(), 16, **options)
    models = [Net() for _ in range(4)]

    def work(group: Group) -> Any:
        with job_of(group, strategy, models[group.rank], **options) as (job, step):
            assert isinstance(step.sync, SharedWeights)
            assert step.sync.group.size == 2
            losses = [float(step(batch)) for batch in job.batches(_data(), 16)]
            half = (step.flat.size - step.flat.offset) / 2 * 4
            own = step.sync.report()["bytes_per_step"]
            assert own == pytest.approx(2 * half + step.flat.header_size * 4, rel=0.1)
            return losses, whole(step)

    assert_same(on_hosts(hosts, work), alone)


@pytest.mark.parametrize("hosts", ["aab", "ab"])
def test_hosts_that_are_uneven_or_have_one_worker_exchange_gradients(hosts: str) -> None:
    models = [Net() for _ in hosts]

    def work(group: Group) -> type:
        with job_of(group, SHARED, models[group.rank]) as (_, step):
            return type(step.sync)

    assert set(on_hosts(hosts, work)) == {DdpSync}
