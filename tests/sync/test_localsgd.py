"""Local SGD and DiLoCo: steps alone, averages, outer steps, and what a checkpoint keeps of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import Group, Op
from shoal.errors import NotBuilt, StrategyError
from shoal.replica.flat_params import FlatParams
from shoal.strategy.strategy import parse
from shoal.sync.localsgd import LocalSgdSync
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.conftest import World
from tests.jobs import CPU, after_training, model_of, weights_of
from tests.models import convnet, mlp, samples

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
PLAIN = partial(torch.optim.SGD, lr=0.1)


def start(
    group: Group, text: str, model: nn.Module, **options: Any
) -> tuple[Job, Step, LocalSgdSync]:
    job = Job(parse(text), group, device=CPU, seed=3)
    step = job.step(model, F.cross_entropy, **{"optimizer": SGD, **options})
    assert isinstance(step.sync, LocalSgdSync)
    return job, step, step.sync


after = partial(after_training, data=samples(64), batch_size=8, epochs=9, optimizer=SGD)


def mean(group: Group, tensor: Tensor) -> Tensor:
    found = tensor.clone()
    group.all_reduce(found, Op.MEAN).wait()
    return found


# ------------------------------------------------------------------------------ averages


@pytest.mark.parametrize("size", [2, 3])
def test_replicas_are_apart_between_averages_and_the_same_after(world: World, size: int) -> None:
    for steps in range(1, 7):
        found = after(world, size, "localsgd(every=3)", weights_of, steps=steps)
        assert all(torch.equal(data, found[0]) for data in found) == (steps % 3 == 0)


def test_the_average_is_that_of_replicas_that_trained_alone(world: World) -> None:
    """Three steps on the halves of batches, by hand; the gradient is that of a replica's mean."""
    x, y = samples(24).tensors
    batches = list(zip(x.split(8), y.split(8), strict=True))
    options: Any = {"data": batches, "batch_size": None, "optimizer": SGD}
    model, _ = after_training(world, 2, "localsgd(every=3)", model_of, **options)
    wanted = []
    for rank in range(2):
        alone = mlp()
        optimizer = SGD(alone.parameters())
        for inputs, targets in batches:
            rows = slice(rank * 4, rank * 4 + 4)
            optimizer.zero_grad()
            F.cross_entropy(alone(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        wanted.append([p.detach() for p in alone.parameters()])
    for p, a, b in zip(model.parameters(), *wanted, strict=True):
        torch.testing.assert_close(p.detach(), (a + b) / 2)


def test_loss_is_the_global_one_at_averages_and_the_own_one_between(world: World) -> None:
    first, second = after(world, 2, "localsgd(every=2)", steps=4)
    assert first[0] != second[0] and first[2] != second[2]
    assert first[1] == second[1] and first[3] == second[3]
    alone = after(world, 1, "single", steps=1)[0][0]
    assert (first[0] + second[0]) / 2 == pytest.approx(alone, abs=1e-6)


def test_every_16_sends_a_sixteenth(world: World) -> None:
    def look(job: Job, step: Step, losses: Any) -> dict[str, Any]:
        job.evaluate(F.cross_entropy, samples(8))  # no part of training
        return step.sync.report()

    one, sixteen = (
        after(world, 4, f"localsgd(every={every})", look, steps=33)[0] for every in (1, 16)
    )
    assert one["bytes_per_step"] == one["ddp_bytes_per_step"]
    assert sixteen["bytes_sent"] * 33 == one["bytes_sent"] * 2


def test_batchnorm_is_local_and_its_running_statistics_are_averaged(world: World) -> None:
    def look(job: Job, step: Any, losses: Any) -> bool:
        own = step.model[1].running_mean
        return torch.allclose(own, mean(job.group, own), atol=1e-8)

    options: Any = {"make": convnet, "data": samples(48, (1, 4, 4))}
    for steps in range(1, 5):
        found = after(world, 2, "localsgd(every=3)", look, steps=steps, **options)
        assert found == [steps == 3] * 2


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
    models = [mlp(), mlp()]

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


def test_between_averages_a_checkpoint_keeps_what_the_next_outer_step_needs(
    world: World, tmp_path: Path
) -> None:
    text = 'localsgd(every=4, outer="nesterov(lr=0.7)")'

    def save(job: Job, step: Any, losses: Any) -> tuple[Tensor, Tensor]:
        job.save(tmp_path)
        return step.sync.agreed.data.clone(), mean(job.group, step.flat.data)

    agreed, average = after(world, 2, text, save, steps=6)[0]
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


# ------------------------------------------------------------------------------ overlap, fragments


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_late_average_keeps_what_was_learned_since_it_was_sent(world: World, delay: int) -> None:
    """agreed -= 0.5·mean(agreed - sent);  weights += agreed - sent, of two replicas by hand."""
    steps = 9
    x, y = samples(8 * steps).tensors
    batches = list(zip(x.split(8), y.split(8), strict=True))
    text = f'localsgd(every=3, outer="sgd(lr=0.5)", overlap=True, delay={delay})'
    options: Any = {"data": batches, "batch_size": None, "optimizer": PLAIN}
    found = after_training(world, 2, text, weights_of, **options)

    alone = [mlp() for _ in range(2)]
    agreed = torch.nn.utils.parameters_to_vector(alone[0].parameters()).detach()
    own, sent = [agreed.clone(), agreed.clone()], [agreed, agreed]
    for step, (inputs, targets) in enumerate(batches, 1):
        for rank, model in enumerate(alone):
            torch.nn.utils.vector_to_parameters(own[rank].clone(), model.parameters())
            rows = slice(rank * 4, rank * 4 + 4)
            loss = F.cross_entropy(model(inputs[rows]), targets[rows])
            grads = torch.autograd.grad(loss, list(model.parameters()))
            own[rank] = own[rank] - 0.1 * torch.nn.utils.parameters_to_vector(grads)
        if step > delay and (step - delay) % 3 == 0:
            agreed = agreed - 0.5 * (agreed - (sent[0] + sent[1]) / 2)
            own = [weights + agreed - then for weights, then in zip(own, sent, strict=True)]
        if step % 3 == 0:
            sent = list(own)
    for flat, expected in zip(found, own, strict=True):
        model = mlp()
        torch.nn.utils.vector_to_parameters(expected, model.parameters())
        torch.testing.assert_close(flat, weights_of_model(model), atol=1e-6, rtol=0)


def weights_of_model(model: nn.Module) -> Tensor:
    return FlatParams(model.named_parameters()).data


def test_alone_an_overlapped_average_changes_nothing(world: World) -> None:
    plain, late = (
        after(world, 1, text, weights_of, steps=11)[0]
        for text in ("single", "localsgd(every=3, overlap=True, fragments=2)")
    )
    torch.testing.assert_close(late, plain, atol=1e-6, rtol=0)


def test_fragments_have_every_parameter_once_and_take_turns(world: World) -> None:
    """Of 8 steps: fragment 0 in steps 2 and 6, fragment 1 in steps 4 and 8."""
    text = "localsgd(every=4, fragments=2)"
    models = [mlp(), mlp()]

    def body(group: Group) -> list[list[bool]]:
        job, step, sync = start(group, text, models[group.rank])
        flat = step.flat
        assert [f.due for f in sync.fragments] == [2, 4]
        dealt = [i for f in sync.fragments for i in flat.params_in(f.at)]
        assert dealt == list(range(len(flat.params)))
        equal = []
        for batch in job.batches(samples(64), 8):
            step(batch)
            spread = mean(group, flat.data) - flat.data
            equal.append([not spread[f.at].any() for f in sync.fragments])
        return equal

    for equal in world(2, body):
        assert [at for at, (first, _) in enumerate(equal, 1) if first] == [2, 6]
        assert [at for at, (_, second) in enumerate(equal, 1) if second] == [4, 8]


def test_fragments_send_the_same_bytes_in_smaller_messages(world: World) -> None:
    def look(job: Job, step: Step, losses: Any) -> int:
        return int(step.sync.report()["bytes_sent"])

    one, four = (
        after(world, 2, f"localsgd(every=4, overlap=True, fragments={k})", look, steps=8)[0]
        for k in (1, 4)
    )
    assert one == four


LATE = [
    'localsgd(every=4, outer="nesterov(lr=0.7)", overlap=True)',
    'localsgd(every=4, outer="adam(lr=0.1)", overlap=True, delay=3, fragments=2)',
    'localsgd(every=4, outer="nesterov", overlap=True, delay=3, fragments=2, compress="int4")',
    'localsgd(every=4, overlap=True, compress="powersgd(rank=1)")',
]


@pytest.mark.parametrize("text", LATE)
def test_late_averages_have_the_same_bits_in_every_run_and_saving_changes_none(
    world: World, tmp_path: Path, text: str
) -> None:
    def body(group: Group, models: list[nn.Module], saves: bool) -> Tensor:
        job, step, _ = start(group, text, models[group.rank])
        for batch in job.batches(samples(64), 8, epochs=9, steps=14):
            step(batch)
            if saves:
                job.save(tmp_path)
                job.evaluate(F.cross_entropy, samples(8))
        job.close()
        return step.flat.data.clone()

    runs = [
        world(2, partial(body, models=[mlp(), mlp()], saves=saves))
        for saves in (False, False, True)
    ]
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


@pytest.mark.parametrize("text", LATE[:2])
@pytest.mark.parametrize("saved_at", [5, 8, 9, 11])
def test_a_checkpoint_has_what_is_under_way(
    world: World, tmp_path: Path, text: str, saved_at: int
) -> None:
    """One replica, which is its own mean, continues as if it had not been interrupted."""
    finish: Any = {"data": samples(64), "batch_size": 8, "epochs": 9, "steps": 16}

    def save(job: Job, step: Any, losses: Any) -> None:
        job.save(tmp_path)

    [whole] = after_training(world, 1, text, weights_of, **finish)
    after_training(world, 1, text, save, **{**finish, "steps": saved_at})
    [continued] = after_training(world, 1, text, weights_of, **finish, load=tmp_path)
    torch.testing.assert_close(continued, whole, atol=1e-5, rtol=0)
    other = text.replace("every=4", "every=5, fragments=3").replace(", fragments=2", "")
    after_training(world, 1, other, weights_of, **finish, load=tmp_path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("delay=2", "delay=2 is for overlap=True"),
        ("every=4, overlap=True, delay=5", "delay=5 is more than every=4"),
        ("every=4, fragments=5", "fragments=5 is more than every=4"),
        ("overlap=True, elastic=True", "takes neither overlap nor fragments: after a loss"),
        ("fragments=2, elastic=True", "takes neither overlap nor fragments: after a loss"),
    ],
)
def test_late_averages_that_make_no_sense_are_refused(options: str, sentence: str) -> None:
    with pytest.raises(StrategyError, match=sentence):
        parse(f"localsgd({options})")


def test_fragments_of_a_split_replica_are_refused() -> None:
    with pytest.raises(NotBuilt, match="averaged at different steps; take localsgd"):
        parse("localsgd(fragments=2) + pp(2)").require_built()
