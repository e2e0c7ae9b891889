"""SIGTERM: the running step ends, a checkpoint is saved where the script saves, status 143."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.runtime.preemption import Preemption
from shoal.runtime.run_dir import RunDir
from tests import forked
from tests.scripts import HEAD

SCRIPT = (
    HEAD
    + """
def train(job):
    step = job.step(model(), loss, optimizer=sgd)
    for batch in job.batches(data, batch_size=20, epochs=100_000):
        step(batch)
        if job.steps == 5:
            IN_LOOP
            job.print("go on")
    AT_END

if __name__ == "__main__":
    shoal.run(train)
"""
)
SAVES_EVERY_STEP = SCRIPT.replace("IN_LOOP", 'job.save("saved", {"by": "the script"})').replace(
    "AT_END", ""
)
SAVES_AT_THE_END = SCRIPT.replace("IN_LOOP", "").replace("AT_END", 'job.save("saved")')


@contextmanager
def going_on(tmp_path: Path, script: str, *words: str) -> Iterator[forked.Popen]:
    """`shoal run` of a script that has printed "go on"; killed at the end."""
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "shoal", "run", *words, "train.py"]
    pipe = subprocess.PIPE
    process = forked.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        while "go on" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def preempted(tmp_path: Path, script: str, workers: int, strategy: str) -> tuple[int, str]:
    """The exit status and stderr of a run that gets SIGTERM after its fifth step."""
    with going_on(tmp_path, script, "-n", str(workers), "-s", strategy) as process:
        process.terminate()
        _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("ddp", 2), ("ps", 2), ("localsgd(every=4)", 2), ('gossip(mode="async")', 2), ("single", 1)],
)
def test_a_checkpoint_is_saved_where_the_script_has_saved(
    tmp_path: Path, strategy: str, workers: int
) -> None:
    status, stderr = preempted(tmp_path, SAVES_EVERY_STEP, workers, strategy)
    assert status == 143, stderr
    assert "shoal: SIGTERM: stopped after step" in stderr
    manifest = (tmp_path / "saved" / "manifest.json").read_text()
    assert json.loads(manifest)["steps"] > 5, stderr
    assert "the script" in manifest


def test_a_script_that_saves_at_its_end_gets_there(tmp_path: Path) -> None:
    status, stderr = preempted(tmp_path, SAVES_AT_THE_END, 2, "ddp")
    assert status == 143, stderr
    assert (tmp_path / "saved").exists(), stderr


def test_in_lockstep_all_ranks_stop_after_the_step_that_the_first_chooses(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    first, other = (Preemption(run_dir, rank, 2) for rank in range(2))
    first.is_asked = True  # the other one has not heard of it
    assert not other.stops_after(8, False, 1)
    assert not first.stops_after(7, True, 1)
    assert other.stops_after(8, False, 1)
    assert first.stops_after(8, True, 1)


def test_elsewhere_they_stop_where_none_of_them_has_been(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    first, other = (Preemption(run_dir, rank, 2) for rank in range(2))
    first.is_asked = other.is_asked = True
    assert not first.stops_after(3, True, 4)
    assert run_dir.last_step() is None  # the other one has not said how far it is
    assert not other.stops_after(9, False, 4)
    assert not first.stops_after(4, True, 4)
    assert run_dir.last_step() == 12
    assert not other.stops_after(11, False, 4)
    assert other.stops_after(12, False, 4)


def ends_by(number: signal.Signals, command: list[str], **env: str) -> int:
    """The exit status of a process that gets the signal when it has printed a line."""
    environ = {**os.environ, **env}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        return process.wait(50)


@pytest.mark.parametrize("waits", [False, True])
def test_a_worker_alone_or_that_waits_for_servers_dies_by_sigterm(
    tmp_path: Path, waits: bool
) -> None:
    if waits:
        RunDir(tmp_path).preempted.touch()
    script = f"""
import time
from contextlib import nullcontext
from pathlib import Path
from shoal.runtime.preemption import Preemption
from shoal.runtime.run_dir import RunDir
with Preemption(RunDir(Path({str(tmp_path)!r})), 1, 2) as preemption:
    with preemption.starting() if {waits} else nullcontext():
        print("ready", flush=True)
        time.sleep(60)
"""
    assert ends_by(signal.SIGTERM, [sys.executable, "-c", script]) == -signal.SIGTERM


def test_a_server_that_loads_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "shoal.server.main"]
    assert ends_by(signal.SIGTERM, command, PYTHONPATH=path) == -signal.SIGTERM


def test_the_pipe_of_an_event_loop_is_given_back(tmp_path: Path) -> None:
    pipe, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    before = signal.set_wakeup_fd(wakeup)
    try:
        with Preemption(RunDir(tmp_path)):
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        assert signal.set_wakeup_fd(before) == wakeup
        os.close(pipe)
        os.close(wakeup)


def test_a_data_loader_that_has_inherited_the_pipe_of_signals_does_not_keep_a_worker_alive() -> (
    None
):
    """A script that raised inside of a loop over its DataLoader hung at its end."""
    with Preemption(None) as preemption:
        inherited = os.dup(preemption._wakeup)
    os.close(inherited)
