"""A worker of a parameter server, of asynchronous gossip or of hogwild is lost and comes back."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.comm.group import Group
from shoal.comm.transport.shm.lasting_memory import LastingMemory, MemoryGone
from shoal.errors import PeerLost, RunOver
from shoal.launch.here.watches import kept_memory
from shoal.runtime.run_dir import RunDir, read
from shoal.sync.lasting import KeptStatistics
from shoal.train.job import Job
from tests.conftest import World
from tests.elastic import Killed
from tests.returning import PER_EPOCH, STEPS, Run, Style, numbered
from tests.server.helpers import launched

IN_MEMORY = ['gossip(graph="complete", mode="async")', "hogwild"]
PS = ['ps(mode="async", servers=2)', "ps(staleness=2, servers=2)", "ps(quorum=0.9, servers=2)"]


@pytest.fixture(autouse=True)
def two_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with launched(monkeypatch, 2):
        yield


def lose_and_return(run: Run, world: World, victim: int, at: int = 3, until: int = 8) -> list[Job]:
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

    jobs = world(run.size, body)
    assert [job.steps for job in jobs] == [STEPS] * 3
    return jobs


@pytest.mark.product
@pytest.mark.parametrize("style", ["epochs", "in the loop"])
@pytest.mark.parametrize("strategy", ['gossip(mode="async")', *IN_MEMORY, 'ps(mode="async")'])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_all_workers_get_the_results_of_what_they_do_together(
    world: World, tmp_path: Path, strategy: str, style: Style, victim: int
) -> None:
    """The others have evaluated at step 5 without it; at 10, 15 and 20 it takes part."""
    run = Run(tmp_path, strategy, 3, style)
    lose_and_return(run, world, victim)
    others = [run.results[rank, 0] for rank in range(3) if rank != victim]
    assert others == [[1.0] * 4] * 2
    assert run.results[victim, 1] == ([1.0] * 4 if style == "epochs" else [1.0] * 3)
    returned = read(run.run_dir.back(victim, 1))
    assert returned is not None and returned["lost_at"] == 3 and 8 <= returned["step"] <= 11
    assert (tmp_path / "saved").is_dir()


@pytest.mark.product
@pytest.mark.parametrize("style", ["epochs", "in the loop"])
@pytest.mark.parametrize("strategy", PS)
def test_it_goes_on_at_the_present_step_with_the_samples_of_its_rank(
    world: World, tmp_path: Path, strategy: str, style: Style
) -> None:
    run = Run(tmp_path, strategy, 3, style)
    lose_and_return(run, world, victim=1, until=7)
    steps_of = [sorted(step for rank, step in run.trained if rank == r) for r in range(3)]
    assert steps_of[1] == [0, 1, 2, *range(7, STEPS)], "what it missed is left out"
    for epoch in range(1, STEPS // PER_EPOCH):
        steps = range(epoch * PER_EPOCH, (epoch + 1) * PER_EPOCH)
        numbers = torch.cat([seen for (_, step), seen in run.trained.items() if step in steps])
        assert len(numbers.unique()) == len(numbers), "no sample is trained twice in an epoch"
        assert len(numbers) == len(numbered()) - 4 * 2 * (epoch == 1)
    (leader, _) = run.reports[0]["sync"][0]["servers"]
    assert leader["came_back"] == {"1": 4} and leader["lost"] == []
    returned = read(run.run_dir.back(1, 1))
    assert returned is not None and (returned["step"], returned["lost_at"]) == (7, 3)


@pytest.mark.parametrize("strategy", ["hogwild", PS[1]])
def test_it_trains_the_weights_of_the_others_not_those_of_its_start(
    world: World, tmp_path: Path, strategy: str
) -> None:
    jobs = lose_and_return(Run(tmp_path, strategy, 3, "in the loop"), world, victim=0)
    ends = [torch.cat([p.flatten() for p in job._steps[0].model.parameters()]) for job in jobs]
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[1], ends[2])


@pytest.mark.whole
def test_under_gossip_it_begins_with_the_mean_of_the_others(world: World, tmp_path: Path) -> None:
    jobs = lose_and_return(Run(tmp_path, IN_MEMORY[0], 3, "in the loop"), world, 1)
    flats = [job._steps[0].flat.data for job in jobs]
    assert float((flats[1] - flats[0]).abs().max()) < 0.2, "not those of its own start"
    assert jobs[0]._steps[0].sync.report()["lost"] == []


@pytest.mark.parametrize("strategy", IN_MEMORY)
def test_a_worker_may_come_that_was_not_there_at_the_start(
    world: World, tmp_path: Path, strategy: str
) -> None:
    run = Run(tmp_path, strategy, 2, "in the loop")
    run.run_dir.note_exit(1, 0)  # the launcher has not started it

    late = threading.Thread(target=run.live, args=(1, 1))
    has_come = threading.Event()

    def after_step(rank: int, generation: int, job: Job) -> None:
        if rank == 1:
            has_come.set()
        elif job.steps == 7:
            late.start()
            assert has_come.wait(60)

    run.after_step = after_step
    world(1, lambda group: run.live(0))
    late.join(60)
    assert run.results[1, 1] == [1.0] * 3
    assert (run.reports[0]["steps"], run.reports[1]["steps"]) == (STEPS, STEPS)
    if strategy != "hogwild":
        rates = [run.reports[rank]["sync"][0]["bytes_per_step"] for rank in range(2)]
        assert rates[1] > 0.9 * rates[0], "by its own steps"


@pytest.mark.parametrize("strategy", IN_MEMORY)
def test_without_the_others_there_is_nothing_to_come_back_to(
    world: World, tmp_path: Path, strategy: str
) -> None:
    run = Run(tmp_path, strategy, 1 + 1, "in the loop")
    run.run_dir.note_exit(1, -9)
    world(1, lambda group: run.live(0))
    with pytest.raises(PeerLost, match="gone with the last worker"):
        run.live(1, 1)
    run.run_dir.mark_finished(0)
    with pytest.raises(RunOver):
        run.live(1, 2)


# ---- what is kept -------------------------------------------------------------------------------


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


def _fill(memory: mmap.mmap) -> None:
    memory[8:10] = b"ok"


def test_the_first_makes_the_memory_and_others_find_it_at_any_that_is_alive(tmp_path: Path) -> None:
    first = LastingMemory.join(tmp_path / "m", 0, 4096, _fill)
    second = LastingMemory.join(tmp_path / "m", 1, 4096, pytest.fail)
    first.close()
    third = LastingMemory.join(tmp_path / "m", 0, 4096, pytest.fail)
    third.memory[10:11] = b"!"
    assert second.memory[8:11] == b"ok!"
    second.close()
    third.close()
    with pytest.raises(MemoryGone):
        LastingMemory.join(tmp_path / "m", 0, 4096, _fill)


def test_a_launcher_keeps_it_when_all_workers_are_lost(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    folder = run_dir.memory_folder("m")
    LastingMemory.join(folder, 0, 4096, lambda _: None).close()  # as one that was killed before
    with kept_memory(run_dir):
        first = LastingMemory.join(folder, 0, 4096, _fill, is_kept=True)
        second = LastingMemory.join(folder, 1, 4096, pytest.fail, is_kept=True)
        assert not second.is_left
        second.memory[9:10] = b"!"
        first.close()
        second.close()
        late = LastingMemory.join(folder, 2, 4096, pytest.fail, is_kept=True)
        assert late.is_left and late.memory[8:10] == b"o!"
        late.close()
