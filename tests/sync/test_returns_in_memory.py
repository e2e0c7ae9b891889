"""A worker of asynchronous gossip or hogwild is lost, comes back, and finds the shared memory."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import pytest
import torch

from shoal.errors import PeerLost, RunOver
from shoal.launch.here.watches import kept_memory
from shoal.runtime.run_dir import RunDir
from shoal.train.job import Job
from shoal.transport.shm.lasting_memory import LastingMemory, MemoryGone
from tests.conftest import World
from tests.returning import STEPS, Run, Style
from tests.sync.test_ps_returns import lose_and_return

STRATEGIES = ['gossip(mode="async")', 'gossip(graph="complete", mode="async")', "hogwild"]


@pytest.mark.product
@pytest.mark.parametrize("style", ["epochs", "in the loop"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("victim", [0, 1])
def test_it_goes_on_at_the_present_step(
    world: World, tmp_path: Path, strategy: str, style: Style, victim: int
) -> None:
    run = Run(tmp_path, strategy, 3, style)
    jobs = lose_and_return(run, world, victim, at=3, until=8)
    assert [job.steps for job in jobs] == [STEPS] * 3
    others = [run.results[rank, 0] for rank in range(3) if rank != victim]
    assert others == [[1.0] * 4] * 2
    assert run.results[victim, 1] == ([1.0] * 4 if style == "epochs" else [1.0] * 3)
    returned = run.run_dir.read_return(victim, 1)
    assert returned is not None and returned["lost_at"] == 3 and 8 <= returned["step"] <= 11
    assert (tmp_path / "saved").is_dir()


def test_under_hogwild_it_trains_the_weights_of_the_others(world: World, tmp_path: Path) -> None:
    jobs = lose_and_return(Run(tmp_path, "hogwild", 3, "epochs"), world, 1, at=3, until=8)
    ends = [torch.cat([p.flatten() for p in job._steps[0].model.parameters()]) for job in jobs]
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[1], ends[2])


@pytest.mark.whole
def test_under_gossip_it_begins_with_the_mean_of_the_others(world: World, tmp_path: Path) -> None:
    run = Run(tmp_path, 'gossip(graph="complete", mode="async")', 3, "in the loop")
    jobs = lose_and_return(run, world, 1, at=3, until=8)
    flats = [job._steps[0].flat.data for job in jobs]
    assert float((flats[1] - flats[0]).abs().max()) < 0.2, "not those of its own start"
    assert jobs[0]._steps[0].sync.report()["lost"] == []


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
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


# ------------------------------------------------------------------ the memory


def test_the_first_makes_it_and_others_find_it_at_any_that_is_alive(tmp_path: Path) -> None:
    first = LastingMemory.join(tmp_path / "m", 0, 4096, _fill)
    second = LastingMemory.join(tmp_path / "m", 1, 4096, lambda _: pytest.fail("it is there"))
    first.close()
    third = LastingMemory.join(tmp_path / "m", 0, 4096, lambda _: pytest.fail("it is there"))
    third.memory[10:11] = b"!"
    assert second.memory[8:11] == b"ok!"
    second.close()
    third.close()
    with pytest.raises(MemoryGone):
        LastingMemory.join(tmp_path / "m", 0, 4096, _fill)


def test_a_launcher_keeps_it_when_all_workers_are_lost(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    folder = run_dir.memory_folder("m")
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


def test_memory_that_no_launcher_has_kept_was_not_used_and_is_made_again(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    folder = run_dir.memory_folder("m")
    LastingMemory.join(folder, 0, 4096, lambda _: None).close()  # as one that was killed meanwhile
    with kept_memory(run_dir):
        again = LastingMemory.join(folder, 1, 4096, _fill, is_kept=True)
        assert again.memory[8:10] == b"ok"
        again.close()


def _fill(memory: mmap.mmap) -> None:
    memory[8:10] = b"ok"


@pytest.mark.parametrize("strategy", ["hogwild", 'gossip(mode="async")'])
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
