"""Runs on hosts that an engine lends."""

from __future__ import annotations

import base64
import os
import signal
import stat
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.commands.launching import open_engine
from shoal.errors import BadInput, WorkersFailed
from shoal.launch.here.local import LaunchSpec
from shoal.launch.here.output import Write
from shoal.launch.here.running import RunEntry, entries
from shoal.launch.hosts.machines import Machine, place_evenly
from shoal.launch.hosts.remote import run_attempts
from shoal.launch.hosts.remote_servers import AGENT_COMMAND
from shoal.runtime.config import RunConfig
from shoal.runtime.secret import new_secret
from tests.launch.helpers import Screen
from tests.launch.hosts_here import HostsHere

NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR SHOAL_HOST"


def run(
    tmp_path: Path,
    program: str,
    slots: list[int],
    workers: int,
    write: Write | None = None,
    logs: Path | None = None,
    **changes: Any,
) -> Screen:
    script = tmp_path / "script.py"
    script.write_text(program)
    config = RunConfig.from_environment().with_environ(TMPDIR=str(tmp_path))
    shown = Screen()
    config = replace(config, **changes)
    spec = LaunchSpec([sys.executable, str(script)], workers, config, logs=logs)
    with HostsHere(slots) as machines:
        run_attempts(machines, spec, write or shown)
    assert not list(tmp_path.glob("shoal-*"))
    return shown


@pytest.mark.parametrize(
    ("slots", "started", "workers", "ranks"),
    [
        ((2, 3, 2), 4, 4, [("a", [0, 1]), ("b", [2, 3])]),  # neighbours on a host
        ((3, 1, 2), 4, 4, [("a", [0, 1, 2]), ("b", [3])]),
        # of an elastic run: the first evenly
        ((3, 1, 2), 3, 6, [("a", [0]), ("b", [1]), ("c", [2]), ("a", [3, 4]), ("c", [5])]),
        ((3, 1, 2), 4, 5, [("a", [0, 1]), ("b", [2]), ("c", [3]), ("c", [4])]),
    ],
)
def test_which_ranks_are_on_which_host(
    slots: tuple[int, ...], started: int, workers: int, ranks: list[tuple[str, list[int]]]
) -> None:
    hosts = [Machine(name, "10.0.0.1", count) for name, count in zip("abc", slots, strict=True)]
    placed = place_evenly(hosts, started, workers)
    assert [(on.machine.name, list(on.ranks)) for on in placed] == ranks
    with pytest.raises(BadInput, match="room for 2 workers on 1 host, not for 3"):
        place_evenly([Machine("a", "10.0.0.1", 2)], 3, 3)


def test_without_ray_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("machines", "cluster", "slots"):
        monkeypatch.delitem(sys.modules, f"shoal.launch.managers.ray_{name}", raising=False)
    with pytest.raises(BadInput, match=r"pip install 'shoal\[ray\]'"):
        open_engine("ray", RunConfig())


def test_workers_have_the_variables_of_torchrun_and_one_secret(tmp_path: Path) -> None:
    shown = run(
        tmp_path,
        "import os, stat\n"
        f"print(*(os.environ[name] for name in '{NAMES}'.split()))\n"
        "file = os.environ['SHOAL_SECRET_FILE']\n"
        "print('port', os.environ['MASTER_PORT'])\n"
        "print('secret', open(file).read(), oct(stat.S_IMODE(os.stat(file).st_mode)))\n"
        "print('threads', os.environ['OMP_NUM_THREADS'], 'SHOAL_SECRET' in os.environ)\n",
        [2, 1],
        3,
    )
    lines = sorted(shown.out.splitlines())
    assert [line for line in lines if "127.0.0" in line] == [
        "[0 h0] 0 0 3 2 127.0.0.1 127.0.0.1",
        "[1 h0] 1 1 3 2 127.0.0.1 127.0.0.1",
        "[2 h1] 2 0 3 1 127.0.0.1 127.0.0.2",
    ]
    for word in ("port", "secret"):
        assert len({line.split("] ")[1] for line in lines if f"] {word}" in line}) == 1
    assert all("0o600" in line for line in lines if "secret" in line)
    assert all("False" in line for line in lines if "threads" in line)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        ("sys.exit('no such luck')", r"failed .*:\nno such luck"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.kill(os.getppid(), signal.SIGKILL)", "was killed by SIGKILL"),  # with its agent
    ],
)
def test_a_failure_names_worker_and_host_and_ends_the_others(
    tmp_path: Path, act: str, says: str
) -> None:
    program = "import os, signal, sys, time\n"
    program += f"if os.environ['RANK'] == '1': {act}\ntime.sleep(60)\n"
    with pytest.raises(WorkersFailed, match=f"worker 1 on h1 {says}"):
        run(tmp_path, program, [1, 1], 2)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_ends_all_workers_and_preempted_ones_have_the_time_that_they_need(
    tmp_path: Path, number: signal.Signals, error: type[BaseException]
) -> None:
    program = (
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(2.5)\n"  # longer than after Ctrl-C
        "    print('saved')\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('up', os.getpid())\n"
        "time.sleep(60)\n"
    )
    shown = Screen()

    def write(text: str, is_stderr: bool) -> None:
        shown(text, is_stderr)
        if "up" in text and shown.out.count("up") == 2:
            os.kill(os.getpid(), number)

    with pytest.raises(error) as end:
        run(tmp_path, program, [1, 1], 2, write=write)
    assert shown.out.count("saved") == (2 if number == signal.SIGTERM else 0)
    assert number == signal.SIGINT or end.value.code == 143  # type: ignore[attr-defined]
    pids = [int(line.split()[-1]) for line in shown.out.splitlines() if "up" in line]
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_after_a_loss_hosts_are_asked_for_again_and_all_workers_start(tmp_path: Path) -> None:
    lost = str(tmp_path / "lost")
    program = (
        "import os, signal, sys, time\n"
        f"if not os.path.exists({lost!r}):\n"
        "    if os.environ['RANK'] == '0': time.sleep(60)\n"
        f"    open({lost!r}, 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('again', os.environ['RANK'], 'SHOAL_KILL' in os.environ)\n"
    )
    shown = run(tmp_path, program, [1, 1], 2, restarts=1, kill=("1@5",))
    assert (
        "worker 1 on h1 was killed by SIGKILL; all workers are started again (1 of 1)" in shown.err
    )
    assert sorted(shown.out.splitlines()) == ["[0 h0] again 0 False", "[1 h1] again 1 False"]


def test_an_error_of_the_script_is_not_tried_again(tmp_path: Path) -> None:
    program = "import sys\nprint('once')\nsys.exit('wrong')\n"
    shown = Screen()
    with pytest.raises(WorkersFailed, match="wrong"):
        run(tmp_path, program, [1], 1, shown, restarts=3)
    assert shown.out.splitlines() == ["[0 h0] once"]


COUNTS_STEPS = """
import os, sys, time
from pathlib import Path
rank = os.environ["RANK"]
(Path(os.environ["SHOAL_HOST_DIR"]) / f"steps-{rank}").write_text("%018d" % (40 + int(rank)))
print("err", rank, file=sys.stderr)
while not Path("seen").exists():
    print("out", rank, flush=True)
    time.sleep(0.02)
"""


@pytest.mark.whole
def test_runs_of_other_hosts_are_shown_with_their_steps_and_logged_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[RunEntry] = []

    def write(text: str, is_stderr: bool) -> None:
        script = str(tmp_path / "script.py")
        seen.extend(e for e in entries() if e.script == script and e.steps == 42)
        if seen:
            (tmp_path / "seen").touch()

    run(tmp_path, COUNTS_STEPS, [2, 1], 3, write, logs=tmp_path / "logs")
    assert seen[0].hosts == ("h0", "h0", "h1")
    for rank in range(3):
        lines = (tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert set(lines) == {f"err {rank}", f"out {rank}"} and lines.count(f"err {rank}") == 1


WAITS = """
import os, time
from pathlib import Path
print("started", os.environ["RANK"], flush=True)
while not Path("seen").exists():
    time.sleep(0.02)
"""


def open_places(folder: Path) -> dict[str, bytes]:
    """Arguments and environments of all processes, files of the run, what `shoal ps` shows."""
    found = {}
    for path in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
        with suppress(OSError):
            found[str(path)] = path.read_bytes()
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file() and path.name != "secret":
                found[str(path)] = path.read_bytes()
    for entry in entries():
        found[entry.name] = repr(entry.document()).encode()
    return found


def test_the_secret_is_in_no_argument_environment_log_or_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    secret = new_secret()
    key = tmp_path / "secret"  # the file that the user names
    key.write_text(secret.hex())
    key.chmod(0o600)
    looked: dict[str, bytes] = {}
    modes: list[int] = []
    shown: list[str] = []

    def write(text: str, is_stderr: bool) -> None:
        shown.append(text)
        if sum("started" in line for line in shown) == 2:
            looked.update(open_places(tmp_path))
            modes.extend(path.stat().st_mode for path in tmp_path.rglob("secret"))
            (tmp_path / "seen").touch()

    run(tmp_path, WAITS, [1, 1], 2, write, tmp_path / "logs", secret_file=key)
    pieces = (secret, secret.hex().encode(), base64.b64encode(secret)[:40])
    assert any(AGENT_COMMAND[-1].encode() in text for text in looked.values())
    assert any(path.endswith("rank-1.log") for path in looked)
    where = [path for path, text in looked.items() if any(piece in text for piece in pieces)]
    assert where == []
    assert len(modes) >= 3 and all(stat.S_IMODE(mode) == 0o600 for mode in modes)
    assert secret.hex() not in "".join(shown)
