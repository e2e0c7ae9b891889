"""The table of workers in a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console, Group

from shoal.commands.live_view import WorkerRow, WorkersView, workers_table
from shoal.runtime.waits import is_waiting, waiting
from shoal.train.throughput import LiveSender
from tests.scripts import script


def lines_of(rows: list[WorkerRow], height: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80, highlight=False).print(Group(*workers_table(rows, height)))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_row_a_worker() -> None:
    rows = [
        WorkerRow(0, "training", 1200, 31.5, 1008.4, 0.031),
        WorkerRow(1, "back", 1198, 30.0, 99.96, 0.5),
        WorkerRow(2, "lost", 40),
        WorkerRow(3),
    ]
    assert lines_of(rows, 20) == [
        "worker  step behind samples/s waiting state",
        "     0 1,200            1,008      3% training",
        "     1 1,198      2     100.0     50% back",
        "     2    40  1,160                   lost",
        "     3     0  1,200                   starting",
    ]
    assert "steps/s" in lines_of(rows[2:], 20)[0]


def test_more_workers_than_lines() -> None:
    rows = [WorkerRow(rank, "training", 120 + rank % 5) for rank in range(64)]
    rows[40].state = "lost"
    rows[63].step = 100
    lines = lines_of(rows, 4)
    assert [line.split()[0] for line in lines[1:5]] == ["0", "5", "40", "63"]
    assert lines[5:] == ["… and 60 more, steps 120 to 124"]
    assert len(lines_of(rows, -3)) == 3


def state_of(view: WorkersView, rank: int) -> str:
    return view._rows[rank].state


def own(rank: int, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "step": 5, "state": "training", **more}


def test_states_of_workers() -> None:
    view = WorkersView(4, started=3)
    assert [state_of(view, rank) for rank in range(4)] == ["starting"] * 3 + ["not started"]
    for record in (own(0), own(1, state="waiting"), {"rank": 2, "state": "lost"}):
        view.show(record)
    view.show(own(2))  # sent before it was lost
    assert [state_of(view, rank) for rank in range(3)] == ["training", "waiting", "lost"]
    view.show({"rank": 2, "state": "starting"})
    assert state_of(view, 2) == "starting"
    view.show(own(2))
    view.show({"rank": 0, "state": "finished"})
    view.show({"rank": 3, "state": "starting"})
    view.show(own(3))
    assert [state_of(view, rank) for rank in (0, 2, 3)] == ["finished", "back", "training"]
    for strange in (own(4), own(-1), own(0, step="x"), {"rank": None}, {"rank": 0, "state": 1}):
        view.show(strange)
    assert state_of(view, 0) == "finished"
    view.close()


def test_the_training_thread_waits() -> None:
    """In a function `wait` of Shoal, or in a block that says so; another thread does not count."""
    here = threading.get_ident()
    waits: dict[str, Any] = {"__name__": "shoal.comm.anything", "is_waiting": is_waiting}
    exec("def wait(thread): return is_waiting(thread)", waits)
    assert not is_waiting(here)
    assert waits["wait"](here)
    with waiting("rank 0", "rank 1", "PULL"):
        assert is_waiting(here)
        assert not is_waiting(here + 1)


class TrainingJob:
    steps = 100
    _throughput = SimpleNamespace(samples=3200.0)


def test_what_a_worker_sends() -> None:
    job: Any = TrainingJob()
    live = LiveSender(3, lambda record: None)
    live.look(job)
    assert (live.record()["rank"], live.record()["state"]) == (3, "starting")
    job.steps = 101  # what was before its end counts for no speed
    live.look(job)
    assert (live.record()["steps_per_s"], live.record()["state"]) == (0, "training")
    job.steps, job._throughput.samples = 110, 3488.0
    with waiting("rank 3", "rank 1", "PULL"):
        live.look(job)
    found = live.record()
    assert (found["step"], found["waiting"], found["state"]) == (110, 0.5, "training")
    assert found["samples_per_s"] == pytest.approx(32 * found["steps_per_s"])


ON = script("""
from pathlib import Path
def train(job):
    step = job.step(model(), loss, optimizer=sgd)
    for batch in job.batches(data, batch_size=20, epochs=10**6):
        job.log(loss=step(batch))
        if Path(sys.argv[1]).exists():
            return
""")


@pytest.mark.whole
def test_a_terminal_shows_who_is_lost_and_who_is_back(tmp_path: Path) -> None:
    (tmp_path / "on.py").write_text(ON)
    over = tmp_path / "over"
    words = ["-m", "shoal", "run", "-n", "3", "--restart", "1", "-s", 'gossip(mode="async")']
    words += ["--kill", "1@5", "--kill", "2@9", str(tmp_path / "on.py"), str(over)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, *words])
    seen = b""
    with open(terminal, "rb", buffering=0) as output:
        try:
            while data := output.read(65536):
                seen += data
                if all(re.search(rb"  ?" + state + rb" *\r", seen) for state in (b"lost", b"back")):
                    over.touch()
        except OSError:  # the terminal has no other side any more
            pass
    assert os.waitpid(pid, 0)[1] == 0
    assert over.exists()
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")  # the cursor is there again
