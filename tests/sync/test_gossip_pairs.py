"""Asynchronous gossip between hosts: a pair has the mean of both, at whichever rank it begins."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.errors import BadInput, PeerLost
from shoal.runtime.config import RunConfig
from shoal.strategy.strategy import parse
from shoal.sync.gossip_async import AsyncGossip
from shoal.sync.gossip_pairs import PairwiseGossip
from shoal.train.job import Job
from shoal.train.step.run_services import RunServices
from shoal.train.step.step import Step
from tests.conftest import World, run_world
from tests.jobs import CPU
from tests.models import mlp, samples

SGD = partial(torch.optim.SGD, lr=0.1)
RING = 'gossip(mode="async")'
SECRET = bytes(range(32))


def job_at(group: Group, strategy: str, per_host: int = 1, secret: bytes | None = SECRET) -> Job:
    """The job of a worker. Hosts are as they are said, and connections are real."""
    host = f"host {group.rank // per_host}"
    config = RunConfig(host_id=host, hostname="127.0.0.1", secret=secret, seed=3)
    return Job(parse(strategy), group, device=CPU, seed=3, services=RunServices(config=config))


def pairs_of(step: Step) -> PairwiseGossip:
    assert isinstance(step.sync, PairwiseGossip)
    return step.sync


def slopes() -> nn.Module:
    """With `mean_output` its gradients do not depend on its weights."""
    torch.manual_seed(0)
    return nn.Linear(6, 1, bias=False)


def mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


@pytest.mark.parametrize("per_host", [1, 2])
def test_it_trains_and_all_evaluate_the_mean(world: World, per_host: int) -> None:
    models = [mlp() for _ in range(4)]
    data = samples(64)

    def body(group: Group) -> tuple[float, float, dict[str, Any]]:
        job = job_at(group, RING, per_host)
        step = job.step(models[group.rank], F.cross_entropy, optimizer=SGD)
        before = float(job.evaluate(F.cross_entropy, data, batch_size=64))
        for batch in job.batches(data, 16, epochs=6):
            step(batch)
        loss = job.evaluate(F.cross_entropy, data, batch_size=64)
        with step.sync.full_weights():
            weights = float(step.flat.data[1:].sum())
        job.close()
        return float(loss) - before, weights, step.sync.report()

    found = world(4, body)
    assert len({(loss, weights) for loss, weights, _ in found}) == 1
    assert found[0][0] < -0.05
    reports = [report for *_, report in found]
    steps, sent, read = (
        sum(report[name] for report in reports) for name in ("steps", "bytes_sent", "bytes_read")
    )
    assert steps == 4 * 24
    assert sent == read == 2 * steps * (sent // (2 * steps))  # each step the weights, both ways
    assert all(report["distance_to_neighbours"][0][1] > 0 for report in reports)


@settings(max_examples=10)
@given(
    st.sampled_from(["ring", "complete", "star", "one-peer", "exponential"]),
    st.integers(2, 5),
    st.integers(1, 8),
)
def test_the_mean_over_workers_is_that_of_one_device(graph: str, workers: int, steps: int) -> None:
    """For gradients that do not depend on weights: no update is lost or counts twice."""
    data = samples(40 * steps)
    models = [slopes() for _ in range(workers)]

    def body(group: Group) -> Tensor:
        job = job_at(group, f'gossip(graph="{graph}", mode="async")')
        step = job.step(models[group.rank], mean_output, optimizer=SGD)
        for batch in job.batches(data, 40):
            step(batch)
        with step.sync.full_weights():
            mean = step.model.weight.detach()[0].clone()
        job.close()
        return mean

    expected = slopes().weight.detach()[0] - 0.1 * steps * data.tensors[0].mean(0)  # type: ignore[operator]
    for mean in run_world(workers, body):
        torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-5)


def test_a_worker_that_has_finished_answers_until_all_have(world: World) -> None:
    """The centre of a star trains one step, the others eight."""
    models = [mlp() for _ in range(3)]

    def body(group: Group) -> int:
        job = job_at(group, 'gossip(graph="star", mode="async")')
        step = job.step(models[group.rank], F.cross_entropy, optimizer=SGD)
        for batch in job.batches(samples(96), 12, steps=1 if group.rank == 0 else 8):
            step(batch)
        job.close()
        return pairs_of(step).reads

    centre, *others = world(3, body)
    assert centre == 8 + 8 + 1 and sorted(others) == [8, 8 + 1]


@pytest.mark.parametrize(("victim", "finds"), [(0, 1), (1, 0)])
def test_a_lost_neighbour_ends_the_run_with_a_sentence(
    world: World, victim: int, finds: int
) -> None:
    """Whether the one that is left asks it, or was to be asked."""
    models = [mlp() for _ in range(2)]

    def body(group: Group) -> str:
        job = job_at(group, RING)
        step = job.step(models[group.rank], F.cross_entropy, optimizer=SGD)
        sync = pairs_of(step)
        if group.rank == victim:
            sync._end()  # as when its process is killed
            return ""
        with pytest.raises(PeerLost) as lost:
            for batch in job.batches(samples(96), 12, epochs=100):
                step(batch)
        job.close()
        return str(lost.value)

    said = world(2, body)[finds]
    assert said.startswith(f"rank {finds} lost rank {victim} in averaging weights (")


def test_a_checkpoint_and_a_loop_of_the_users_own_keep_the_mean(
    world: World, tmp_path: Any
) -> None:
    models = [slopes() for _ in range(3)]

    def body(group: Group) -> list[Tensor]:
        job = job_at(group, RING)
        model, optimizer = job.setup(
            models[group.rank], torch.optim.SGD(models[group.rank].parameters(), lr=0.1)
        )
        found = []
        for _ in range(2):
            for rows, _ in job.batches(samples(36), 12):
                optimizer.zero_grad()
                job.backward(model(rows).mean())
                optimizer.step()
            job.save(tmp_path / "saved")
            job.load(tmp_path / "saved")
            sync = job._steps[0].sync
            with sync.full_weights():
                found.append(model.weight.detach()[0].clone())
        job.close()
        return found

    step = 0.1 * 3 * samples(36).tensors[0].mean(0)
    first = slopes().weight.detach()[0]  # type: ignore[operator]
    for found in world(3, body):
        for number, mean in enumerate(found, start=1):
            torch.testing.assert_close(mean, first - number * step, rtol=1e-5, atol=1e-5)


def test_hosts_decide_how_it_runs_and_several_need_a_secret(world: World) -> None:
    models = [mlp() for _ in range(2)]

    def kind(group: Group, per_host: int, secret: bytes | None) -> type:
        job = job_at(group, RING, per_host, secret)
        step = job.step(models[group.rank], F.cross_entropy, optimizer=SGD)
        job.close()
        return type(step.sync)

    assert set(world(2, lambda group: kind(group, 2, None))) == {AsyncGossip}
    assert set(world(2, lambda group: kind(group, 1, SECRET))) == {PairwiseGossip}
    with pytest.raises(BadInput, match="SHOAL_SECRET"):
        world(2, lambda group: kind(group, 1, None))
