"""A loop of the user's own has the single-device result under every synchronous strategy."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from shoal.comm.executors.solo import solo_group
from shoal.errors import BadInput
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World
from tests.models import convnet, mlp, samples
from tests.splitting import (
    Script,
    assert_close,
    assert_script_equal,
    assert_script_refused,
    run,
    update,
)

GOSSIP = 'gossip(graph="complete")'
SYNCHRONOUS = [
    *("ddp", "zero(1)", "zero(2)", "zero(3)", 'ps(placement="rank0")', GOSSIP),
    "ddp(bucket_mb=0.0001)",
]
SEVERAL_PARTS = ["ddp", "zero(2)", "zero(3)", 'ps(placement="rank0")']
RELAXED = [
    *('ps(placement="rank0", mode="async")', 'ps(placement="rank0", staleness=1)'),
    *('ps(placement="rank0", quorum=0.5)', "localsgd(every=2)", 'gossip(graph="ring")'),
    *('ddp(compress="int8")', 'localsgd(every=2, outer="nesterov(lr=0.7)")'),
]
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-3)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def halving(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, 2, 0.5)


def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.2, total_steps=20)  # changes momentum, too


def plain(
    job: Job, model: nn.Module, data: Any = None, optimizer: Any = ADAM, schedule: Any = halving
) -> list[float]:
    model, optimizer = job.setup(model, optimizer)
    scheduler = schedule(optimizer)
    losses = []
    for x, y in job.batches(data or samples(47), 10):
        losses.append(float(job.backward(F.cross_entropy(model(x), y))))
        update(optimizer)
        scheduler.step()
    assert job.steps == len(losses)
    return losses


def test_the_last_batch_has_fewer_samples_than_workers(world: World) -> None:
    script = partial(plain, data=samples(22, (1, 4, 4)))
    assert_script_equal(world, 4, "ddp", script, convnet)
    assert_script_equal(world, 4, "zero(3)", script, convnet)


@pytest.mark.parametrize("strategy", RELAXED)
def test_strategies_that_do_not_equal_one_device_train(world: World, strategy: str) -> None:
    script = partial(plain, optimizer=partial(torch.optim.SGD, lr=0.05))
    models = [mlp(), mlp()]
    for losses, _ in world(2, lambda g: run(g, strategy, models[g.rank], script)):
        assert len(losses) == 5 and all(loss == loss for loss in losses)


def accumulating(job: Job, model: nn.Module) -> list[float]:
    """Two passes a step are reduced one by one, or together; gradients are read and clipped."""
    optimizer = SGD(model.parameters())
    scheduler = one_cycle(optimizer)
    model, optimizer = job.setup(model, optimizer)
    seen = []
    for i, (x, y) in enumerate(job.batches(samples(47), 10)):
        loss = F.cross_entropy(model(x), y)
        if i % 3 == 0:
            with job.no_sync():
                job.backward(loss, retain_graph=True)
        else:
            job.backward(loss, retain_graph=True)
        if i % 3 != 1:
            seen.append(float(job.backward(0.5 * loss)))
        seen.append(float(job.clip_grad_norm_(model, 0.3)))
        update(optimizer)
        scheduler.step()
    return seen


def gan(job: Job, model: nn.Module) -> list[float]:
    """Two models that are frozen in turns, a gradient penalty, a detached forward."""
    critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    for i, p in enumerate(critic.parameters()):
        nn.init.constant_(p, 0.1 * (i + 1))
    model, optimizer = job.setup(model, SGD)
    critic, critic_optimizer = job.setup(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
    losses = []
    for x, _ in job.batches(samples(33), 10):
        fake = model(x).detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic(fake).sum(), fake, create_graph=True)
        losses.append(float(job.backward(critic(fake).mean() + slope.norm(dim=1).mean())))
        update(critic_optimizer)
        critic.requires_grad_(False)
        losses.append(float(job.backward(-critic(model(x)).mean())))
        update(optimizer)
        critic.requires_grad_(True)
    assert job.steps == 4
    return losses


def divided(job: Job, model: nn.Module) -> list[float]:
    """Two optimizers on one model, of which one part is frozen at first; a loose parameter."""
    params = list(model.parameters())
    scale = nn.Parameter(torch.ones(()))
    params[0].requires_grad_(False)
    head = torch.optim.SGD([*params[2:], scale], lr=0.1)
    body = torch.optim.AdamW([{"params": params[0], "lr": 1e-3}, {"params": params[1]}], eps=1e-3)
    model, body, head = job.setup(model, body, head)
    losses = []
    for i, (x, y) in enumerate(job.batches(samples(47), 10)):
        params[0].requires_grad_(i > 1)
        losses.append(float(job.backward(F.cross_entropy(scale * model(x), y))))
        head.step()
        if i % 2:
            body.step()
        job.clip_grad_norm_(params, 10.0)
        head.zero_grad()
        body.zero_grad()
    return losses


def lbfgs(job: Job, model: nn.Module) -> list[float]:
    """It decides by the loss of the global batch."""
    model, optimizer = job.setup(
        model, torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    )
    losses = []
    for x, y in job.batches(samples(15), 10):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            job.backward(loss)
            return loss

        losses.append(float(optimizer.step(closure)))
    return losses


def contrastive(job: Job, model: nn.Module) -> list[float]:
    """One loss of all rows on every worker, and one where each worker has its own rows."""
    model, optimizer = job.setup(model, SGD)
    losses = []
    for x, y in job.batches(samples(22), 10):
        rows = model(x)
        everything = job.gather(rows)
        products = (everything @ everything.T).square().mean()
        losses.append(float(job.backward(products, retain_graph=True)))
        own = F.cross_entropy(rows, y) + (rows @ everything.T).mean()
        losses.append(float(job.backward(own)))
        total = job.sum(0 if job._loop.rows.is_placeholder else len(y))
        assert len(everything) == len(job.gather(y)) == total
        update(optimizer)
    return losses


def counting(job: Job, model: nn.Module) -> list[float]:
    """A loss that is a mean over some of the samples; early stopping."""
    model, optimizer = job.setup(model, SGD)
    losses = []
    for x, y in job.batches(samples(50), 10):
        chosen = y < 2
        total = F.cross_entropy(model(x), y, reduction="none")[chosen].sum()
        loss = total / chosen.sum().clamp(min=1)
        losses.append(float(job.backward(loss, count=chosen.sum())))
        update(optimizer)
        if job.any(job.rank == 0 and len(losses) == 3):
            break
    return losses


def scaled(job: Job, model: nn.Module) -> list[float]:
    """Autocast and GradScaler, as for fp16; in the second step the loss overflows."""
    model, optimizer = job.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for i, (x, y) in enumerate(job.batches(samples(40), 10)):
        with torch.autocast("cpu", enabled=False):
            loss = F.cross_entropy(model(x), y)
        job.backward(scaler.scale(loss) * (float("inf") if i == 1 and job.rank == 0 else 1.0))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(scaler.get_scale())
    return losses


def clipped_by_torch(job: Job, model: nn.Module, norm_type: float = 2.0) -> list[float]:
    """By the norm over all workers. The last backward before a step is not reduced by then."""
    model, optimizer = job.setup(model, partial(torch.optim.SGD, lr=0.3))
    norms = []
    for x, y in job.batches(samples(40), 10):
        with job.no_sync():
            job.backward(10 * F.cross_entropy(model(x), y))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)))
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        update(optimizer)
    return norms


by_largest = partial(clipped_by_torch, norm_type=float("inf"))


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = spectral_norm(nn.Linear(3, 8))
        self.b = spectral_norm(nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.b(self.a(x).relu())
        return logits


JUDGE = Judge()


def whole_beside_split(job: Job, model: nn.Module) -> list[float]:
    judge = deepcopy(JUDGE)  # ranks are threads with one generator
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, eps=1e-3) for m in (model, judge)]
    model, judge, *optimizers = job.setup(model, judge, *optimizers)
    losses = []
    for x, y in job.batches(samples(30), 10):
        losses.append(float(job.backward(F.cross_entropy(judge(model(x)), y))))
        update(*optimizers)
    return losses


COLUMN_ROW = 'tp(2, plan={"0": "column", "2": "row"})'
EQUAL: list[tuple[Script, list[str]]] = [
    (plain, [*SYNCHRONOUS, "tp(2)", "ddp + tp(2)"]),
    (accumulating, [*SYNCHRONOUS, "tp(2)"]),
    (gan, SEVERAL_PARTS),
    (divided, SEVERAL_PARTS),
    (lbfgs, ["ddp"]),
    (contrastive, ["ddp", "zero(3)"]),
    (counting, ["ddp"]),
    (scaled, ["ddp", "zero(2)", "zero(3)", "tp(2)", GOSSIP]),
    (clipped_by_torch, ["ddp", "zero(1)", "zero(3)", "tp(2)"]),
    (by_largest, ["ddp"]),  # where workers have whole gradients
    (whole_beside_split, ["tp(2)", COLUMN_ROW]),
]
SIZES = {contrastive: 4, counting: 3}


@pytest.mark.product
@pytest.mark.parametrize(
    ("script", "strategy"),
    [
        *((script, strategy) for script, strategies in EQUAL for strategy in strategies),
        pytest.param(whole_beside_split, "ddp + tp(2)", marks=pytest.mark.whole),
        pytest.param(whole_beside_split, "zero(3) + tp(2)", marks=pytest.mark.whole),
    ],
)
def test_a_loop_has_the_result_of_one_device(world: World, script: Script, strategy: str) -> None:
    assert_script_equal(world, 4 if "+" in strategy else SIZES.get(script, 2), strategy, script)


def mixing() -> nn.Module:
    """Between its layers every feature depends on all of them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 3))


def calling_layers(job: Job, model: nn.Module) -> None:
    """The loop calls modules of the model, never the model."""
    model, _ = job.setup(model, ADAM)
    for x, y in job.batches(samples(10), 10):
        for layer in model:
            x = layer(x)
        job.backward(F.cross_entropy(x, y))


def by_loss_backward(job: Job, model: nn.Module) -> None:
    model, optimizer = job.setup(model, SGD)
    for x, y in job.batches(samples(20), 10):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("strategy", "script", "make", "sentence"),
    [
        ("pp(2)", plain, mlp, r"job\.step"),
        ('mapreduce(batch="mini")', plain, mlp, r"job\.step"),
        ("ddp", by_loss_backward, mlp, r"job\.backward"),
        ("zero(1)", lbfgs, mlp, "LBFGS"),
        ('ps(placement="rank0", mode="async")', scaled, mlp, "GradScaler"),
        ("zero(2)", by_largest, mlp, "norm_type=inf"),
        # a split is proven before it is trained
        (COLUMN_ROW, plain, mixing, "does not compute what the model does"),
        (COLUMN_ROW, calling_layers, mlp, "call the"),
    ],
)
def test_what_a_strategy_cannot_do_in_a_loop_is_refused(
    world: World, strategy: str, script: Script, make: Callable[[], nn.Module], sentence: str
) -> None:
    assert_script_refused(world, strategy, script, sentence, make)


@pytest.mark.parametrize("strategy", ["ddp", "tp(2)"])
def test_a_parameter_has_one_optimizer(world: World, strategy: str) -> None:
    def script(job: Job, model: nn.Module) -> None:
        params = list(model.parameters())  # tp replaces them
        with pytest.raises(BadInput, match=r"weight twice: .*one optimizer"):
            job.setup(model, SGD(params), SGD(params[:1]))
        job.setup(model, SGD(params))
        for again in ((model,), (nn.Sequential(model, mlp()),), (mlp(), SGD(params))):
            with pytest.raises(BadInput, match=r"weight of Sequential twice"):
                job.setup(*again)

    models = [mlp(), mlp()]
    world(2, lambda g: run(g, strategy, models[g.rank], script))


def test_servers_follow_a_scheduler_or_refuse(world: World) -> None:
    """One worker under a relaxed rule does what it does alone."""
    relaxed = 'ps(placement="rank0", mode="async")'
    assert_script_equal(world, 1, relaxed, partial(plain, optimizer=SGD))
    with pytest.raises(BadInput, match="changes momentum"):
        script = partial(plain, optimizer=SGD, schedule=one_cycle)
        world(1, lambda g: run(g, relaxed, mlp(), script))


def saving(job: Job, model: nn.Module, path: Path, loads: bool = False) -> list[float]:
    """As `divided`, with schedulers; saved after 2 of 4 steps."""
    params = list(model.parameters())
    params[0].requires_grad_(False)
    head = torch.optim.SGD(params[2:], lr=0.1, momentum=0.9)
    body = torch.optim.AdamW([{"params": params[0]}, {"params": params[1], "lr": 0.01}], eps=1e-3)
    model, body, head = job.setup(model, body, head)
    scheduler = StepLR(head, 1, 0.5)
    ema = job.ema(model, 0.5)
    if loads:
        scheduler.load_state_dict(job.load(path)["scheduler"])
    losses = []
    for x, y in job.batches(samples(40), 10):
        params[0].requires_grad_(True)
        losses.append(float(job.backward(F.cross_entropy(model(x), y))))
        update(head, body)
        scheduler.step()
        ema.update()
        if len(losses) == 2 and not loads:
            job.save(path, {"scheduler": {"last_epoch": scheduler.last_epoch}})
    with ema.applied():
        averaged = job.evaluate(F.cross_entropy, samples(40))
    return [*losses, averaged, head.param_groups[0]["lr"]]


@pytest.mark.parametrize(
    ("first", "second"), [("ddp", "zero(3)"), ("zero(2)", 'ps(placement="rank0")')]
)
def test_another_strategy_continues_a_saved_loop(
    world: World, tmp_path: Path, first: str, second: str
) -> None:
    models = [mlp() for _ in range(4)]
    script = partial(saving, path=tmp_path / "saved")
    before = world(2, lambda g: run(g, first, models[g.rank], script))
    after = world(2, lambda g: run(g, second, models[2 + g.rank], partial(script, loads=True)))
    assert after[0][0] == pytest.approx(before[0][0][2:], abs=2e-5)
    assert_close(after[0][1], before[0][1])


def with_target(job: Job, model: nn.Module, path: Path, loads: bool) -> list[Tensor]:
    """A target network follows the model; no optimizer knows it."""
    target = mlp()
    model, target, optimizer = job.setup(model, target, torch.optim.SGD(model.parameters(), 0.1))
    for x, y in [] if loads else job.batches(samples(20), 10):
        job.backward(F.cross_entropy(model(x), y) + (model(x) - target(x).detach()).square().mean())
        update(optimizer)
        with torch.no_grad():
            for p in target.parameters():
                p.mul_(0.5)
    (job.load if loads else job.save)(path)
    (prepared,) = job._loop.untrained
    whole = prepared.shard.gather_full(dict(prepared.model.named_parameters()))
    return [p.detach().clone() for p in whole.values()]


@pytest.mark.parametrize("strategy", ["zero(3)", "tp(2)"])
def test_a_checkpoint_has_models_without_an_optimizer(
    world: World, tmp_path: Path, strategy: str
) -> None:
    models = [mlp() for _ in range(3)]
    script = partial(with_target, path=tmp_path / "saved")
    saved = world(2, lambda g: run(g, strategy, models[g.rank], partial(script, loads=False))[0])
    loaded = run(solo_group(), "single", models[2], partial(script, loads=True))[0]
    for given in saved:
        torch.testing.assert_close(given, loaded)


@pytest.mark.parametrize("of_each", [False, True])
def test_a_loop_whose_workers_compute_the_same_batches_says_so(
    world: World, capsys: pytest.CaptureFixture[str], of_each: bool
) -> None:
    x, y = samples(12).tensors

    def body(group: Any) -> None:
        job = Job(parse("ddp"), group, device=torch.device("cpu"))
        model = mlp()
        model, optimizer = job.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        start = 4 * job.rank if of_each else 0
        for _ in range(4):
            rows = slice(start, start + 4)
            job.backward(F.cross_entropy(model(x[rows]), y[rows]))
            optimizer.step()
            optimizer.zero_grad()

    world(3, body)
    assert capsys.readouterr().err.count("computes the same batches") == (0 if of_each else 1)


@pytest.mark.parametrize("of_each", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "zero(3)", "ps"])
def test_a_step_whose_workers_compute_the_same_batches_says_so(
    world: World, capsys: pytest.CaptureFixture[str], strategy: str, of_each: bool
) -> None:
    x, y = samples(12).tensors
    models = [mlp() for _ in range(3)]

    def body(group: Any) -> None:
        job = Job(parse(strategy), group, device=torch.device("cpu"))
        step = job.step(
            models[job.rank], F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1)
        )
        start = 4 * job.rank if of_each else 0
        for _ in range(4):
            step((x[start : start + 4], y[start : start + 4]))
        job.close()

    world(3, body)
    assert capsys.readouterr().err.count("computes the same batches") == (0 if of_each else 1)
