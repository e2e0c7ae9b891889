"""A worker that its template cannot fork is spawned; one that is not there yet can be ended."""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.launch.here import template as module
from shoal.launch.here.processes import Processes, ProcessExit
from shoal.launch.here.template import Template
from tests import scripts

NEVER = "import signal; signal.pause()"
PRINTS = "import os, sys; print(sys.argv); os.write(int(sys.argv[1]), b'progress')"


@contextmanager
def processes(
    serves: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Processes, queue.SimpleQueue[ProcessExit], Template]]:
    """With a template that runs this instead."""
    monkeypatch.setattr(module, "_SERVE", serves)
    events: queue.SimpleQueue[ProcessExit] = queue.SimpleQueue()
    with (
        Template([sys.executable, "-c", PRINTS], os.environ) as template,
        Processes(events.put, template=template) as started,
    ):
        yield started, events, template


def read_all(pipe: int) -> str:
    with open(pipe) as file:
        return file.read()


@pytest.mark.parametrize("serves", ["", "import os; os.abort()", "1 / 0"])
def test_a_worker_of_a_template_that_has_ended_is_spawned(
    monkeypatch: pytest.MonkeyPatch, serves: str
) -> None:
    with processes(serves, monkeypatch) as (started, events, _):
        progress, end = os.pipe()
        command = [sys.executable, "-c", PRINTS, str(end)]
        out, err = started.start(command, os.environ, (end,))
        started.watch()
        assert events.get(timeout=60).returncode == 0
        assert (read_all(out), read_all(err)) == (f"['-c', '{end}']\n", "")
        assert read_all(progress) == "progress"


def test_workers_that_are_not_there_yet_are_ended_by_a_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with processes(NEVER, monkeypatch) as (started, events, template):
        with ThreadPoolExecutor(1) as pool:
            command = [sys.executable, "-c", PRINTS]
            starting = pool.submit(lambda: [started.start(command, os.environ) for _ in range(2)])
            template.cancel()  # as a signal does, before or while the first one is awaited
            pipes = starting.result(timeout=60)
        assert started.running() == []
        started.watch()
        assert [events.get(timeout=60).returncode for _ in range(2)] == [-signal.SIGKILL] * 2
    assert [read_all(pipe) for pair in pipes for pipe in pair] == [""] * 4


@pytest.mark.whole
def test_what_sets_variables_for_torch_is_spawned_and_trains_the_same(tmp_path: Path) -> None:
    said = []
    for name, line in (("forked", ""), ("spawned", "os.environ['MODE'] = 'fast'\n")):
        (tmp_path / f"{name}.py").write_text(f"import os\n{line}{scripts.PLAIN}")
        words = ("run", "-n", "2", "--start-method", "fork", f"{name}.py")
        done = scripts.shoal(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said.append([line.split()[:5] for line in done.stdout.splitlines() if "step 4/" in line])
    assert said[0] == said[1] != []


def test_other_ways_to_start_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    done = scripts.shoal("run", "-n", "2", "--start-method", "clone", "train.py", cwd=tmp_path)
    assert done.returncode == 2 and "fork" in done.stderr and "spawn" in done.stderr
    done = scripts.shoal("run", "-n", "2", "train.py", cwd=tmp_path, SHOAL_START_METHOD="clone")
    assert (
        done.returncode == 2 and "SHOAL_START_METHOD is 'clone': use fork or spawn" in done.stderr
    )
