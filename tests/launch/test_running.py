"""`shoal ps`, `shoal stop` and `--logs`: what runs, how it is ended, what it printed."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.commands.cli import main
from shoal.commands.launching import ENGINES
from shoal.errors import BadInput
from shoal.launch.here.local import LaunchSpec, enter
from shoal.launch.here.output import LineForwarder, LogFiles, discard_lines
from shoal.launch.here.running import _NAMES, RunFacts, enter_run, entries, find_run
from shoal.runtime.config import RunConfig
from shoal.runtime.files import StepCount
from shoal.runtime.run_dir import RunDir, new_run_dir
from tests.launch.test_preemption import SAVES_EVERY_STEP, going_on

alone = pytest.mark.usefixtures("own_folder")
FACTS = RunFacts("ddp", 2, 0, (sys.executable, "train.py"), ("here", "here"))


@contextmanager
def run_of(facts: RunFacts = FACTS) -> Iterator[tuple[str, RunDir]]:
    with new_run_dir() as run_dir:
        yield enter_run(run_dir, facts), run_dir


def shoal(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(words)
    return int(end.value.code or 0)


@alone
def test_runs_have_names_of_their_own_and_are_found_by_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.launch.here.running._NAMES", ("cod", "eel"))
    with ExitStack() as stack:
        runs = dict(stack.enter_context(run_of()) for _ in range(4))
        assert len(runs) == 4
        assert [entry.name for entry in entries()] == list(runs)
        for name, run_dir in runs.items():
            assert find_run(name).run_dir == run_dir
            assert find_run(str(run_dir.path)).name == name
    assert entries() == []


@alone
def test_an_unknown_run_is_one_sentence_with_those_there_are() -> None:
    with pytest.raises(BadInput, match=r"there is no run 'x': on this host runs none of yours"):
        find_run("x")
    with run_of() as (name, _), pytest.raises(BadInput, match=f"'x': on this host runs {name}"):
        find_run("x")


@alone
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": 1}', "\xff", "[" * 100_000])
def test_an_entry_that_cannot_be_read_is_not_shown(text: str) -> None:
    with run_of() as (_, run_dir):
        run_dir.entry.write_text(text)
        assert entries() == []


@alone
def test_ps_shows_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("ps", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []
    with run_of() as (name, run_dir):
        for rank, steps in enumerate((7, 9)):
            count = StepCount(run_dir.steps(rank))
            count.note(steps)
            count.close()
        assert shoal("ps", "--json") == 0
        (shown,) = json.loads(capsys.readouterr().out)
        assert (shown["name"], shown["step"], shown["workers"]) == (name, 9, 2)
        assert (shown["strategy"], shown["script"]) == ("ddp", "train.py")
        assert shown["launcher_pid"] == os.getpid()
        assert shoal("ps") == 0
        assert name in capsys.readouterr().out


@alone
def test_stop_takes_a_name_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("stop") == 2
    assert shoal("stop", "x", "--all") == 2
    assert shoal("stop", "x") == 2
    assert shoal("stop", "--all") == 0
    assert capsys.readouterr().err.count("\n") == 3


@alone
def test_stop_all_asks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []

    def stop(entry: Any, now: bool, timeout: float) -> tuple[bool, str]:
        stopped.append(entry.name)
        return True, "stopped"

    monkeypatch.setattr("shoal.launch.here.running.stop_run", stop)
    with run_of() as (name, _):
        monkeypatch.setattr("sys.stdin", io.StringIO())
        assert shoal("stop", "--all") == 2
        assert f"would stop {name} (train.py): add --yes" in capsys.readouterr().err
        monkeypatch.setattr("sys.stdin", Terminal("n\n"))
        assert shoal("stop", "--all") == 2
        assert stopped == []
        monkeypatch.setattr("sys.stdin", Terminal("y\n"))
        assert shoal("stop", "--all") == 0
        assert shoal("stop", "--all", "--yes") == 0
        assert stopped == [name, name]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def started(tmp_path: Path, script: str, *words: str) -> Iterator[tuple[str, Any]]:
    """A run of two workers that have printed "go on"; its name."""
    with going_on(tmp_path, script, "-n", "2", *words) as process:
        yield next(e.name for e in entries() if e.launcher_pid == process.pid), process


def test_a_run_that_is_stopped_saves_and_its_output_is_in_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with started(tmp_path, SAVES_EVERY_STEP, "--logs", "logs") as (name, process):
        entry = find_run(name)
        assert entry.steps is not None and entry.steps >= 1
        assert (entry.strategy, entry.script, entry.workers) == ("ddp", "train.py", 2)
        assert shoal("stop", name) == 0
        assert process.wait(60) == 143
    assert f"{name} has ended after step " in capsys.readouterr().out
    assert (tmp_path / "saved").exists()
    logs = tmp_path / "logs"
    assert {path.name for path in logs.iterdir()} == {"launcher.log", "rank-0.log", "rank-1.log"}
    assert "go on\n" in (logs / "rank-0.log").read_text()
    assert name not in [entry.name for entry in entries()]


IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("go on", flush=True)
time.sleep(600)
"""


def test_stop_now_ends_a_run_that_does_not_listen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with started(tmp_path, IGNORES_SIGTERM) as (name, process):
        assert shoal("stop", name, "--timeout", "0.1") == 1
        assert f"{name} has not ended yet: shoal stop" in capsys.readouterr().err
        assert shoal("stop", name, "--now") == 0
        assert process.wait(60) == 143
    assert f"{name} was killed before its first step" in capsys.readouterr().out


def test_lines_of_both_streams_are_whole_in_a_log(tmp_path: Path) -> None:
    with LogFiles(tmp_path / "new" / "logs") as logs:
        log = logs.of("rank", 0)
        out, err = (LineForwarder(discard_lines, "[0] ", is_err, log) for is_err in (False, True))
        out.feed(b"one ")
        err.feed(b"error\npart")
        out.feed(b"line\n")
        err.close()
    assert (tmp_path / "new/logs/rank-0.log").read_bytes() == b"error\none line\npart\n"


def test_a_full_disk_ends_a_log_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    (tmp_path / "full.log").symlink_to("/dev/full")
    with LogFiles(tmp_path) as logs:
        log = logs.of("full")
        log(b"lost\n")
        log(b"lost\n")
    assert capsys.readouterr().err.count("full.log ends here") == 1


def test_logs_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"--logs: cannot make the folder .*/file: File exists$"):
        LogFiles(tmp_path / "file")
    with pytest.raises(BadInput, match=r"cannot make the folder .*/file/logs: Not a directory$"):
        LogFiles(tmp_path / "file" / "logs")


def test_no_run_has_the_name_of_an_engine_or_a_launcher() -> None:
    assert not {*ENGINES, "slurm", "k8s", "srun", "torchrun", "mpirun"} & set(_NAMES)


@alone
def test_a_terminal_is_shown_the_name() -> None:
    said: list[str] = []
    spec = LaunchSpec(["python"], 2, RunConfig(strategy="ddp"), shows_name=True)
    with new_run_dir() as run_dir:
        enter(spec, run_dir, lambda text, _: said.append(text))
        (entry,) = entries()
    assert said == [f"shoal: run {entry.name} (shoal stop {entry.name} ends it)\n"]
