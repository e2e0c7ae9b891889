"""Asynchronous gossip: no worker waits, and a worker that dies is left out."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.comm.transport.shm.rank_memory import RankMemory
from shoal.errors import BadInput
from shoal.strategy.strategy import parse
from shoal.sync import gossip_async
from shoal.sync.gossip_async import AsyncGossip
from shoal.train.checkpoints import files
from shoal.train.job import Job
from tests.conftest import World
from tests.models import mlp, samples
from tests.scripts import shoal
from tests.sync.test_gossip import accuracies

CPU = torch.device("cpu")
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
RING = parse('gossip(mode="async")')


def test_it_trains(world: World) -> None:
    found, reports = accuracies(world, 'gossip(mode="async")')
    assert min(found) > 0.9
    for report in reports:
        assert report["lost"] == [] and 0 < report["bytes_read"] <= 2 * report["bytes_sent"]


@pytest.mark.parametrize(("strategy", "victim"), [("hogwild", 0), (str(RING), 0), (str(RING), 2)])
def test_when_a_worker_is_killed_the_others_finish_and_the_first_of_them_tests_and_saves(
    tmp_path: Path, strategy: str, victim: int
) -> None:
    words = ["train", "-n", "4", "-s", strategy, "--kill", f"{victim}@20"]
    words += ["--out", "saved", "--report", "report.json"]
    done = shoal(*words, "digits", "--epochs", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second, third = (rank for rank in range(4) if rank != victim)
    others = f"workers {first}, {second} and {third}, without worker {victim}"
    assert f"shoal: finished by {others}" in done.stderr
    assert f"[{second}] test accuracy" not in done.stdout
    assert float(done.stdout.split(f"[{first}] test accuracy ")[1].split("%")[0]) > 80
    assert files.read(tmp_path / "saved").document["steps"] == 96
    report = json.loads((tmp_path / "report.json").read_text())
    steps = [rank and rank["steps"] for rank in report["ranks"]]
    assert steps == [None if rank == victim else 96 for rank in range(4)]
    if strategy != "hogwild":
        assert [report["ranks"][rank]["sync"][0]["lost"] for rank in (first, third)] == [
            [victim]
        ] * 2


def alone(group: Group, model: nn.Module) -> AsyncGossip:
    step = Job(RING, group, device=CPU).step(model, F.cross_entropy, optimizer=SGD)
    assert isinstance(step.sync, AsyncGossip)
    return step.sync


def test_the_share_of_a_silent_neighbour_goes_to_the_own_weights(world: World) -> None:
    """On a ring of 4 each takes a third; rank 1 lays out fives, rank 3 nothing."""
    models = [mlp() for _ in range(4)]

    def body(group: Group) -> list[float]:
        sync = alone(group, models[group.rank])
        found = []
        sync.flat.data.fill_({1: 5.0}.get(group.rank, 2.0))
        if group.rank == 1:
            sync._lay_out()
        group.barrier().wait()
        if group.rank == 0:
            for _ in range(2):  # the second time there is nothing new
                sync._mix()
                found.append(round(float(sync.flat.data[-1]), 5))
        group.barrier().wait()
        sync.close()
        return found

    assert world(4, body)[0] == [3.0, 3.0]


def test_one_that_has_finished_counts_in_the_mean_and_is_not_waited_for(world: World) -> None:
    models = [mlp() for _ in range(4)]

    def body(group: Group) -> float:
        sync = alone(group, models[group.rank])
        sync.flat.data.fill_(float(group.rank))
        sync._lay_out()
        if group.rank == 3:
            sync.close()
        group.barrier().wait()
        mean = 0.0
        if group.rank == 0:
            for _ in range(2):
                sync._lay_out()  # further than rank 3 will ever be
            sync.ranks._has_ended = {1, 2}.__contains__
            with sync.full_weights():
                mean = float(sync.flat.data[-1])
            assert float(sync.flat.data[-1]) == 0.0
        group.barrier().wait()
        if group.rank != 3:
            sync.close()
        return mean

    assert world(4, body)[0] == 1.5


def test_neither_a_count_nor_batches_of_the_script_need_the_others(world: World) -> None:
    """What the global batch counts is not known here: each takes its part for an equal one."""
    models = [mlp() for _ in range(4)]

    def body(group: Group) -> float:
        job = Job(RING, group, device=CPU)
        step = job.step(
            models[group.rank], F.cross_entropy, optimizer=SGD, count=lambda b: len(b[1])
        )
        if group.rank == 0:  # alone: a collective would wait for the others forever
            [batch] = job.batches([samples(40).tensors])
            loss = float(step(batch))
        group.barrier().wait()
        job.close()
        return loss if group.rank == 0 else 0.0

    assert world(4, body)[0] == pytest.approx(1.1, abs=0.3)


def test_without_common_memory_it_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankMemory, "join", classmethod(lambda cls, *args: None))
    models = [mlp() for _ in range(2)]
    with pytest.raises(BadInput, match=r"share none: .* take ddp"):
        world(2, lambda group: alone(group, models[group.rank]))


def test_distances_to_neighbours_are_recorded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gossip_async, "MEASURE_EVERY", 1)
    models = [mlp() for _ in range(4)]

    def body(group: Group) -> list[list[float]]:
        job = Job(RING, group, device=CPU)
        step = job.step(models[group.rank], F.cross_entropy, optimizer=SGD)
        for batch in job.batches(samples(64), 16):
            step(batch)
            group.barrier().wait()  # so that there is always something to read
        job.close()
        found: list[list[float]] = step.sync.report()["distance_to_neighbours"]
        return found

    for distances in world(4, body):
        assert distances and all(distance > 0 for _, distance in distances)
