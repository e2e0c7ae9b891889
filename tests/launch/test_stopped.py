"""A worker or a server is stopped (SIGSTOP): the others say so, and --timeout ends the run.

And a start that takes long says what is started.
"""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

from shoal.launch.here.watches import start_notice
from tests.scripts import HEAD, shoal

STOP = (
    HEAD
    + """
import signal, time
def train(job):
    step = job.step(model(), loss, optimizer=sgd)
    for batch in job.batches(data, batch_size=20, epochs=1):
        if job.steps == 3:
            os.environ["SHOAL_RANK"] == "1" and os.kill(os.getpid(), signal.SIGSTOP)
        step(batch)

if __name__ == "__main__":
    open(f"here-{os.environ['SHOAL_RANK']}", "w").close()
    while not all(os.path.exists(f"here-{rank}") for rank in (0, 1)):
        time.sleep(0.005)  # the limit is for what comes now
    shoal.run(train)
"""
)


def run(tmp_path: Path, strategy: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "stop.py").write_text(STOP)
    words = ["run", "-n", "2", "-s", strategy, "--timeout", "4", "stop.py"]
    return shoal(*words, cwd=tmp_path, SHOAL_WAIT_NOTICE="0.2", SHOAL_WAIT_REPEAT="0.3")


def test_a_stopped_worker_is_named_and_the_run_ends_at_the_limit(tmp_path: Path) -> None:
    done = run(tmp_path, "ddp")
    assert done.returncode != 0
    assert "worker 1 (process" in done.stderr and "has been stopped for" in done.stderr
    assert done.stderr.count("[0] shoal: rank 0 has waited for rank 1 (process") > 1
    assert "is stopped) in all_reduce #" in done.stderr
    killed = "worker 1 was killed by SIGKILL" in done.stderr
    assert killed or "rank 0 lost rank 1 after 4 s in all_reduce" in done.stderr


def test_servers_name_the_worker_that_they_wait_for(tmp_path: Path) -> None:
    done = run(tmp_path, "ps")
    assert done.returncode != 0
    assert "[server 0] shoal: worker 0 has waited for worker 1 in an update for" in done.stderr
    assert "[0] shoal: rank 0 has waited for server 0 in PULL for" in done.stderr


@pytest.mark.parametrize(
    ("has_started", "is_heard"), [(False, False), (True, False), (False, True)]
)
def test_a_silent_start_is_said_once(has_started: bool, is_heard: bool) -> None:
    said: list[str] = []
    is_over, heard = threading.Event(), threading.Event()

    def ask() -> bool:
        is_over.set()
        return has_started

    silent_s = 600.0 if is_heard else 0.01
    with start_notice("starting 1 server", said.append, heard, ask, silent_s=silent_s):
        assert is_heard or is_over.wait(60)
        heard.set()
    assert said == ([] if has_started or is_heard else ["starting 1 server"])
