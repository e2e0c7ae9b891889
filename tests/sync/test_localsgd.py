"""Local SGD and DiLoCo: steps alone, averages, outer steps, and what a checkpoint keeps of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group, Op
from shoal.errors import StrategyError
from shoal.strategy.strategy import parse
from shoal.sync.localsgd import LocalSgdSync
from shoal.train.checkpoints.files import read
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.conftest import World
from tests.models import Partly, convnet, mlp, samples

CPU = torch.device("cpu")
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
PLAIN = partial(torch.optim.SGD, lr=0.1)
ADAM = partial(torch.optim.Adam, lr=1e-2)


def start(
    group: Group, text: str, model: nn.Module, **options: Any
) -> tuple[Job, Step, LocalSgdSync]:
    job = Job(parse(text), group, device=CPU, seed=3)
    step = job.step(model, F.cross_entropy, **{"optimizer": SGD, **options})
    assert isinstance(step.sync, LocalSgdSync)
    return job, step, step.sync


def train(
    group: Group, text: str, model: nn.Module, steps: int, **options: Any
) -> tuple[Job, Step, LocalSgdSync, list[float]]:
    job, step, sync = start(group, text, model, **options)
    batches = job.batches(samples(64), 8, epochs=9, steps=steps)
    return job, step, sync, [float(step(batch)) for batch in batches]


def mean(group: Group, tensor: Tensor) -> Tensor:
    found = tensor.clone()
    group.all_reduce(found, Op.MEAN).wait()
    return found


def halves(n: int = 2) -> list[nn.Module]:
    return [mlp() for _ in range(n)]


# ------------------------------------------------------------------------------ averages


@pytest.mark.parametrize("size", [2, 3])
def test_replicas_are_apart_between_averages_and_the_same_after(world: World, size: int) -> None:
    models = halves(size)

    def body(group: Group) -> list[Tensor]:
        job, step, _ = start(group, "localsgd(every=3)", models[group.rank])
        return [step(b) and step.flat.data.clone() for b in job.batches(samples(60), 10)]

    found = world(size, body)
    for i in range(6):
        same = all(torch.equal(rank[i], found[0][i]) for rank in found)
        assert same == (i % 3 == 2)


def test_the_average_is_that_of_replicas_that_trained_alone(world: World) -> None:
    """Three steps on the halves of batches, by hand; the gradient is that of a replica's mean."""
    x, y = samples(24).tensors
    models = halves()

    def body(group: Group) -> None:
        job, step, _ = start(group, "localsgd(every=3)", models[group.rank])
        for batch in job.batches(list(zip(x.split(8), y.split(8), strict=True))):
            step(batch)

    wanted = []
    for rank in range(2):
        alone = mlp()
        optimizer = SGD(alone.parameters())
        for inputs, targets in zip(x.split(8), y.split(8), strict=True):
            rows = slice(rank * 4, rank * 4 + 4)
            optimizer.zero_grad()
            F.cross_entropy(alone(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        wanted.append([p.detach() for p in alone.parameters()])
    world(2, body)
    for p, a, b in zip(models[0].parameters(), *wanted, strict=True):
        torch.testing.assert_close(p.detach(), (a + b) / 2)


def test_loss_is_the_global_one_at_averages_and_the_own_one_between(world: World) -> None:
    models = halves()

    def body(group: Group) -> list[float]:
        return train(group, "localsgd(every=2)", models[group.rank], 4)[3]

    first, second = world(2, body)
    assert first[0] != second[0] and first[2] != second[2]
    assert first[1] == second[1] and first[3] == second[3]
    alone = Job(parse("single"), solo_group(), device=CPU, seed=3)
    step = alone.step(mlp(), F.cross_entropy, optimizer=SGD)
    for batch in alone.batches(samples(64), 8, steps=1):
        loss = float(step(batch))
    assert (first[0] + second[0]) / 2 == pytest.approx(loss, abs=1e-6)


def test_every_16_sends_a_sixteenth(world: World) -> None:
    models = halves(4)
    reports = {
        every: world(
            4,
            lambda g, every=every: train(g, f"localsgd(every={every})", models[g.rank], 32)[
                2
            ].report(),
        )[0]
        for every in (1, 16)
    }
    assert reports[1]["bytes_per_step"] == reports[1]["ddp_bytes_per_step"]
    assert reports[16]["bytes_sent"] * 16 == reports[1]["bytes_sent"]


def test_evaluating_sees_the_average_and_leaves_training_as_it_was(world: World) -> None:
    models = halves()

    def body(group: Group) -> None:
        _, step, sync, _ = train(group, "localsgd(every=4)", models[group.rank], 6)
        sent = sync.report()["bytes_sent"]
        own = step.flat.data.clone()
        wanted = mean(group, own)
        assert not torch.equal(own, wanted)
        with sync.full_weights():
            torch.testing.assert_close(step.flat.data, wanted)
        assert torch.equal(step.flat.data, own)
        assert sync.report()["bytes_sent"] == sent
        assert sync.since == 2

    world(2, body)


def test_saving_leaves_training_as_it_was(world: World, tmp_path: Path) -> None:
    def body(group: Group, models: list[nn.Module], save: bool) -> list[float]:
        job, step, _ = start(group, "localsgd(every=3)", models[group.rank], optimizer=ADAM)
        losses = []
        for batch in job.batches(samples(80), 10):
            losses.append(float(step(batch)))
            if save:
                job.save(tmp_path)
        return losses

    # made before the threads start: they share torch's seed
    one = halves()
    other = halves()
    assert world(2, lambda g: body(g, one, True)) == world(2, lambda g: body(g, other, False))


def test_batchnorm_is_local_and_its_running_statistics_are_averaged(world: World) -> None:
    models = [convnet() for _ in range(2)]
    data = samples(48, (1, 4, 4))

    def body(group: Group) -> list[bool]:
        job, step, _ = start(group, "localsgd(every=3)", models[group.rank])
        same = []
        for batch in job.batches(data, 12):
            step(batch)
            own = step.model[1].running_mean  # type: ignore[index]
            same.append(torch.allclose(own, mean(group, own), atol=1e-8))
        return same

    assert world(2, body) == [[False, False, True, False]] * 2


def test_without_a_gradient_a_parameter_keeps_its_bits(world: World) -> None:
    models = [Partly() for _ in range(3)]
    world(3, lambda g: train(g, "localsgd(every=2)", models[g.rank], 4) and None)
    assert torch.equal(models[0].unused.weight, Partly().unused.weight)


@pytest.mark.parametrize("method", ["int8", "onebit", "topk(0.1)", "powersgd(rank=2)"])
def test_compressed_differences_keep_replicas_the_same(world: World, method: str) -> None:
    models = halves(3)

    def body(group: Group) -> tuple[list[float], Tensor, dict[str, Any]]:
        text = f'localsgd(every=2, compress="{method}")'
        job, step, sync = start(group, text, models[group.rank])
        x = samples(48).tensors[0]
        data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
        losses = [float(step(b)) for b in job.batches(data, 12, epochs=10)]
        return losses[1::2], step.flat.data.clone(), sync.report()

    found = world(3, body)
    for losses, data, report in found:
        assert losses == found[0][0]
        assert torch.equal(data, found[0][1])
        assert report["bytes_per_step"] < 0.35 * report["ddp_bytes_per_step"]
    assert sum(found[0][0][-4:]) < 0.7 * sum(found[0][0][:4])


# ------------------------------------------------------------------------------ the outer step


@pytest.mark.parametrize(
    ("settings", "momenta"),
    [
        ("momentum=0.5, warmup=0", [0.5, 0.5, 0.5]),
        ("momentum=0.9", [1 / 11, 2 / 12, 3 / 13]),
        ("momentum=0.5, warmup=2", [1 / 3, 2 / 4, 0.5]),
    ],
)
def test_nesterov_by_hand(world: World, settings: str, momenta: list[float]) -> None:
    """v = m·v + d;  w = w - 0.7·(d + m·v), with d = agreed - average, m by the round."""
    text = f'localsgd(every=2, outer="nesterov(lr=0.7, {settings})")'
    models = halves()

    def body(group: Group) -> None:
        job, step, sync = start(group, text, models[group.rank], optimizer=PLAIN)
        agreed = step.flat.data.clone()
        v = torch.zeros(step.flat.size)
        momentum = iter(momenta)
        apply = sync.update.apply
        own = agreed

        def spy() -> None:
            nonlocal own
            apply()
            own = step.flat.data.clone()

        sync.update.apply = spy  # type: ignore[method-assign]
        for batch in job.batches(samples(60), 10):
            step(batch)
            if sync.since == 0:
                d = agreed - mean(group, own)
                m = next(momentum)
                v = m * v + d
                agreed = agreed - 0.7 * (d + m * v)
                torch.testing.assert_close(step.flat.data, agreed, atol=1e-6, rtol=0)

    world(2, body)


@pytest.mark.parametrize(
    ("outer", "sentence"),
    [
        ("lamb", "there is no outer optimizer 'lamb'; there are sgd, nesterov, adam"),
        ("sgd(beta1=0.9)", "outer sgd has no 'beta1'; it has lr, momentum, warmup"),
        ("sgd(lr=0)", "lr of outer sgd has to be above 0"),
        ("nesterov(momentum=1)", "momentum of outer nesterov has to be from 0 to below 1"),
        ("nesterov(momentum=0)", "say sgd"),
        (f"nesterov(warmup={'9' * 400})", "warmup of outer nesterov has to be 0 or more rounds"),
    ],
)
def test_an_outer_optimizer_that_makes_no_sense_is_refused(outer: str, sentence: str) -> None:
    with pytest.raises(StrategyError, match=sentence):
        parse(f'localsgd(outer="{outer}")')


# ------------------------------------------------------------------------------ checkpoints


def continued(
    group: Group, text: str, model: nn.Module, path: Path, save_at: int | None, **options: Any
) -> tuple[list[float], Tensor]:
    """Eight steps, saved after one of them; or the rest of them, continued from there."""
    job, step, _ = start(group, text, model, **options)
    if save_at is None:
        job.load(path)
    losses = []
    for batch in job.batches(samples(64), 8, epochs=9, steps=8):
        losses.append(float(step(batch)))
        if job.steps == save_at:
            job.save(path)
    return losses, step.flat.data.clone()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("compress", [None, "topk(0.1)", "int8"])
@pytest.mark.parametrize("outer", [None, "nesterov(lr=0.7)", "adam(lr=0.01)"])
def test_a_run_that_was_saved_where_replicas_agree_continues_with_the_same_bits(
    world: World, tmp_path: Path, outer: str | None, compress: str | None, size: int
) -> None:
    """The inner optimizer remembers nothing here, so nothing is averaged."""
    options = [f'outer="{outer}"'] * bool(outer) + [f'compress="{compress}"'] * bool(compress)
    text = f"localsgd({', '.join(['every=2', *options])})"
    models = [[mlp(seed) for _ in range(size)] for seed in (0, 9)]
    whole, again = (
        world(
            size,
            lambda g, at=at, own=own: continued(
                g, text, own[g.rank], tmp_path, at, optimizer=PLAIN
            ),
        )
        for at, own in zip((4, None), models, strict=True)
    )
    for (losses, data), (losses_again, data_again) in zip(whole, again, strict=True):
        assert losses_again == losses[4:]
        assert torch.equal(data_again, data)


def test_between_averages_a_checkpoint_keeps_what_the_next_outer_step_needs(
    world: World, tmp_path: Path
) -> None:
    text = 'localsgd(every=4, outer="nesterov(lr=0.7)")'
    models = halves()

    def save(group: Group) -> tuple[Tensor, Tensor]:
        job, step, sync, _ = train(group, text, models[group.rank], 6)
        job.save(tmp_path)
        return sync.agreed.data.clone(), mean(group, step.flat.data)

    agreed, average = world(2, save)[0]
    more = [mlp(9) for _ in range(3)]

    def load(group: Group) -> None:
        job, step, sync = start(group, text, more[group.rank])
        job.load(tmp_path)
        assert torch.equal(sync.agreed.data, agreed) and sync.since == 2
        torch.testing.assert_close(step.flat.data, average)
        for i, batch in enumerate(job.batches(samples(64), 8, epochs=9, steps=8)):
            step(batch)
            assert (sync.since == 0) == (i == 1)

    world(3, load)


def test_the_saved_momentum_is_the_mean_over_replicas(world: World, tmp_path: Path) -> None:
    models = halves()

    def body(group: Group) -> Tensor:
        job, step, _, _ = train(group, "localsgd(every=4)", models[group.rank], 6)
        job.save(tmp_path)
        buffer = step.update.optimizer.state[step.flat.params[0]]["momentum_buffer"]
        return mean(group, buffer)

    wanted = world(2, body)[0]
    saved = read(tmp_path).optimizer["0:0.weight/momentum_buffer"]
    torch.testing.assert_close(saved, wanted)
