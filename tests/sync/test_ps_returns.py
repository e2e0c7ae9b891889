"""A worker of a parameter server is lost, comes back as another process, and goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from shoal.comm.group import Group
from shoal.sync.lasting import KeptStatistics
from shoal.train.job import Job
from tests.conftest import World
from tests.numbered import Killed
from tests.returning import PER_EPOCH, STEPS, Run, Style, numbered
from tests.server.helpers import launched

RULES = ['mode="async"', "staleness=2", "quorum=0.9"]


def lose_and_return(run: Run, world: World, victim: int, at: int, until: int) -> list[Job]:
    """The victim dies after step `at`, and comes back when the others have done `until` steps."""
    all_train = threading.Barrier(run.size)  # none is lost before the last one has joined
    have_trained: set[int] = set()
    far = threading.Event()
    back = threading.Event()
    waiting = threading.Barrier(run.size - 1, action=far.set)

    def after_step(rank: int, generation: int, job: Job) -> None:
        if rank not in have_trained:
            have_trained.add(rank)
            all_train.wait(60)
        if rank == victim and not generation and job.steps == at:
            raise Killed
        if rank != victim and job.steps == until:
            waiting.wait(60)
            assert back.wait(60)
        if rank == victim and generation:
            back.set()

    run.after_step = after_step

    def body(group: Group) -> Job:
        job = run.live(group.rank)
        if group.rank == victim:
            assert far.wait(60)
            job = run.live(victim, 1)
        return job

    return world(run.size, body)


@pytest.mark.product
@pytest.mark.parametrize("style", ["epochs", "in the loop"])
@pytest.mark.parametrize("rule", RULES)
def test_it_goes_on_at_the_present_step_with_the_samples_of_its_rank(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rule: str, style: Style
) -> None:
    run = Run(tmp_path, f"ps({rule}, servers=2)", 3, style)
    with launched(monkeypatch, 2):
        jobs = lose_and_return(run, world, victim=1, at=3, until=7)
    assert [job.steps for job in jobs] == [STEPS] * 3
    steps_of = [sorted(step for rank, step in run.trained if rank == r) for r in range(3)]
    assert steps_of[1] == [0, 1, 2, *range(7, STEPS)], "what it missed is left out"
    rows = numbered().tensors[0][:, 0]
    for epoch in range(1, STEPS // PER_EPOCH):
        first = epoch * PER_EPOCH
        seen = [
            run.trained[rank, s]
            for rank in range(3)
            for s in range(first, first + PER_EPOCH)
            if (rank, s) in run.trained
        ]
        numbers = torch.cat(seen)
        assert len(numbers.unique()) == len(numbers), "no sample is trained twice in an epoch"
        assert len(numbers) == len(rows) - 4 * 2 * (epoch == 1)
    (leader, _) = run.reports[0]["sync"][0]["servers"]
    assert leader["came_back"] == {"1": 4} and leader["lost"] == []
    returned = run.run_dir.read_return(1, 1)
    assert returned is not None and (returned["step"], returned["lost_at"]) == (7, 3)


@pytest.mark.product
@pytest.mark.parametrize("style", ["epochs", "in the loop"])
@pytest.mark.parametrize("victim", [0, 2])
def test_all_workers_get_the_results_of_what_they_do_together(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, style: Style, victim: int
) -> None:
    """The others have evaluated at step 5 without it; at 10, 15 and 20 it takes part."""
    run = Run(tmp_path, 'ps(mode="async")', 3, style)
    with launched(monkeypatch, 1):
        lose_and_return(run, world, victim, at=3, until=7)
    others = [run.results[rank, 0] for rank in range(3) if rank != victim]
    assert others == [[1.0] * 4] * 2
    assert run.results[victim, 1] == ([1.0] * 4 if style == "epochs" else [1.0] * 3)
    assert (tmp_path / "saved").is_dir()


def test_its_weights_are_those_of_the_servers_not_those_of_its_start(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(tmp_path, "ps(staleness=2, servers=2)", 3, "in the loop")
    with launched(monkeypatch, 2):
        jobs = lose_and_return(run, world, victim=0, at=3, until=7)
    ends = [torch.cat([p.flatten() for p in job._steps[0].model.parameters()]) for job in jobs]
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[1], ends[2])


def test_statistics_of_batchnorm_are_the_latest_that_a_worker_has_kept(tmp_path: Path) -> None:
    mine, theirs = ([torch.zeros(3), torch.zeros(2, dtype=torch.int64)] for _ in range(2))
    other = KeptStatistics(tmp_path, 0, theirs)
    back = KeptStatistics(tmp_path, 1, mine)
    assert not back.take()
    theirs[0].fill_(2.5)
    theirs[1].fill_(7)
    other.keep()
    assert back.take()
    assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
    (tmp_path / "2.statistics").write_bytes(b"cut")
    assert not back.take(), "one that is not of this model is not read"
