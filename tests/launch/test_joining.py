"""Workers that come after the start of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import BadInput, ShoalError
from shoal.launch.here.running import (
    RunFacts,
    StartedWorker,
    ask_to_join,
    enter_run,
    entries,
    wait_for_answer,
    wait_until_joined,
)
from shoal.launch.losses.lost_workers import Tolerance
from shoal.runtime.run_dir import new_run_dir
from tests.launch.helpers import run

pytestmark = pytest.mark.usefixtures("own_folder")
FACTS = RunFacts("ps", 2, 0, ("python", "train.py"), ("here", "here"))
SCRIPT = """
    from pathlib import Path
    from shoal.runtime.run_dir import RunDir
    run_dir = RunDir(Path(run_dir))
    incarnation = int(os.environ.get("SHOAL_INCARNATION", "0"))
    print("incarnation", incarnation, flush=True)
    if rank == 0:
        assert not run_dir.has_exited(0) and run_dir.has_exited(1)
        run_dir.ask_for_join()
        while not run_dir.back(1, 1).exists(): time.sleep(0.005)
    else:
        run_dir.note_return(rank, incarnation, {"step": 40, "lost_at": 0})
    run_dir.write(run_dir.report(rank), {"rank": rank})
"""


def test_a_worker_that_is_asked_for_is_started_as_one_that_comes_back() -> None:
    screen = run(SCRIPT, 3, {"SHOAL_START": "1"}, tolerance=Tolerance("hogwild"))
    ending = screen.result
    assert ending.reports == ({"rank": 0}, {"rank": 1}, None) and not ending.lost
    assert sorted(screen.out.splitlines()) == ["[0] incarnation 0", "[1] incarnation 1"]
    assert screen.err.splitlines() == [
        "shoal: started 1 of 3 workers; shoal join starts another one",
        "shoal: worker 1 of 3 is started, as it was asked for",
        "shoal: worker 1 joined at step 41; 40 steps were not trained before",
        "shoal: finished by workers 0 and 1, without worker 2",
    ]
    (joined,) = (worker.document() for worker in ending.joined)
    shown = {"rank": 1, "step": 40, "lost_at": None, "came_too_late": False, "not_trained": 40}
    assert shown.items() <= joined.items()


def test_which_run_is_asked() -> None:
    with new_run_dir() as first, new_run_dir() as second:
        with pytest.raises(BadInput, match="no run of yours on this host takes a worker"):
            ask_to_join(None)
        first.joins.mkdir()
        run_dir, request = ask_to_join(None)
        assert run_dir == first
        assert (first.take_joins(), first.take_joins()) == ([request], [])
        with pytest.raises(BadInput, match="takes no worker: start it with --elastic, --restart"):
            ask_to_join(str(second.path))
        second.joins.mkdir()
        with pytest.raises(BadInput, match="several runs take a worker"):
            ask_to_join(None)
        assert ask_to_join(str(second.path))[0] == second
        name = enter_run(second, FACTS)
        assert ask_to_join(name)[0] == second
        second.note_exit(1, 0)  # as the launcher notes one that is not started
        assert [entry.present for entry in entries()] == [1]
        with pytest.raises(BadInput, match=f"several runs take a worker: name one of .*{name}"):
            ask_to_join(None)
    for gone in (second.path, Path("/nothing"), Path("/dev/null")):
        with pytest.raises(BadInput, match=f"{gone} is not the folder of a run that goes on"):
            ask_to_join(str(gone))


def test_the_launcher_answers() -> None:
    with new_run_dir() as run_dir:
        run_dir.joins.mkdir()
        requests = [ask_to_join(None)[1] for _ in range(2)]
        run_dir.answer_join(requests[0], "worker 1 of 2 is started", 1)
        run_dir.answer_join(requests[1], "no worker is started: all workers are there", None)
        started = wait_for_answer(run_dir, requests[0])
        assert started == StartedWorker(1, 0, "worker 1 of 2 is started")
        with pytest.raises(ShoalError, match="all workers are there") as caught:
            wait_for_answer(run_dir, requests[1])
        assert not isinstance(caught.value, BadInput), "exit status 1"
        with pytest.raises(ShoalError, match="has not answered for 0 s"):
            wait_for_answer(run_dir, "another", limit_s=0)
    with pytest.raises(ShoalError, match=r"no worker is started: the run in .* has ended"):
        wait_for_answer(run_dir, "another")


def test_a_join_succeeds_only_when_the_worker_has_joined() -> None:
    with new_run_dir() as run_dir:
        run_dir.late(0, 1).touch()
        run_dir.note_return(1, 1, {})
        for rank, status in enumerate((0, 0, 1)):
            run_dir.note_start(rank, 1)
            run_dir.note_exit(rank, status)
        wait_until_joined(run_dir, StartedWorker(1, 1, ""))
        for rank in (0, 2):
            with pytest.raises(ShoalError, match=f"worker {rank} has not joined"):
                wait_until_joined(run_dir, StartedWorker(rank, 1, ""))
    with pytest.raises(ShoalError, match="worker 3 has not joined"):
        wait_until_joined(run_dir, StartedWorker(3, 1, ""))
