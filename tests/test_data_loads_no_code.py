"""What is read as data runs no Python, whatever names it holds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shoal.errors import BadInput
from shoal.launch.lab import lab
from shoal.rehearse.losses import read_losses
from shoal.runtime import lab_files
from tests.checkpoints import write_manifest
from tests.commands.terminal import shoal

ATTACK = (
    "from pathlib import Path\nPath({marker!r}).touch()\ndef attack(*sizes): raise SystemExit\n"
)
NAMES = {
    **{"strategy": "", "script": [""], "example": "", "schedule": "", "command": ["", ""]},
    **{"name": "", "base": "", "optimizer": "", "class": "", "module": "", "hosts": [""]},
}


def named(value: str) -> dict[str, object]:
    """Every key that a reader may follow, with this value."""
    return {
        key: [value] * len(one) if isinstance(one, list) else value for key, one in NAMES.items()
    }


def record(folder: Path, strategy: str) -> None:
    ranks = [{"rank": rank, "steps": 1, "microbatches": 4, "sync": []} for rank in range(2)]
    document = {"strategy": strategy, "workers": 2, "steps": 1, "seconds": 1.0, "ranks": ranks}
    empty: dict[str, list[object]] = {
        key: [] for key in ("lost", "came_back", "joined", "absent", "servers_lost")
    }
    (folder / "report.json").write_text(json.dumps(named(strategy) | document | empty))
    call = {"call": "0,1 #1", "bytes": 600, "detail": "all_reduce"}
    span = {"ph": "X", "pid": 0, "name": "step", "cat": "comm", "ts": 0, "dur": 9, "args": call}
    process = {"name": "process_name", "pid": 0, "args": {"name": "rank 0"}}
    (folder / "trace.json").write_text(json.dumps({"traceEvents": [process, span]}))


@pytest.fixture
def payload(tmp_path: Path) -> str:
    file, marker = tmp_path / "attack.py", tmp_path / "marker"
    file.write_text(ATTACK.format(marker=str(marker)))
    return f"{file}:attack"


@pytest.mark.parametrize(
    "strategy",
    [
        'pp(2, schedule="{}")',
        'pp(2, schedule="{}", microbatches=4)',
        'ddp(algorithm="{}")',
        "{}",
        "{}(every=2) + pp(2)",
        'gossip(graph="pipe.txt")',  # to open it would wait for a writer
    ],
)
@pytest.mark.parametrize("command", ["report", "timeline"])
def test_a_recorded_run(tmp_path: Path, payload: str, strategy: str, command: str) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    record(tmp_path, strategy.format(payload).replace("pipe", str(tmp_path / "pipe")))
    words = ["--out", str(tmp_path / "page.html")] if command == "report" else []
    assert shoal(command, str(tmp_path), *words).exit_code == 0
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("key", ["base", "name", "node.nic", "device.name"])
def test_a_cluster_file(tmp_path: Path, payload: str, key: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f'{key} = "{payload}"\n')
    assert shoal("cluster", "show", str(file)).exit_code == 2
    assert shoal("plan", "--cluster", str(file), "-n", "2", "gpt-3").exit_code == 2
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("key", ["who", "at", "what"])
def test_an_events_file(tmp_path: Path, payload: str, key: str) -> None:
    event = {"at": "90s", "who": "host:0", "what": "kill"} | {key: payload}
    text = "".join(f'{name} = "{value}"\n' for name, value in event.items())
    (tmp_path / "events.toml").write_text(f"[[event]]\n{text}")
    with pytest.raises(BadInput):
        read_losses((), None, tmp_path / "events.toml")
    assert not (tmp_path / "marker").exists()


def test_the_manifest_of_a_checkpoint(tmp_path: Path, payload: str) -> None:
    about = {"about": named(payload), "files": named(payload)}
    write_manifest(tmp_path, {"format": "shoal checkpoint 4"} | about)
    assert "is not of an example" in shoal("eval", str(tmp_path)).stderr
    assert not (tmp_path / "marker").exists()


def test_what_says_which_runs_and_labs_there_are(
    tmp_path: Path, payload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "shoal-run-1"
    run.mkdir(mode=0o700)
    (run / "lock").touch()
    facts = {"workers": 1, "servers": 0, "launcher_pid": os.getpid()}
    (run / "run.json").write_text(json.dumps(named(payload) | facts))
    (tmp_path / "lab.json").write_text(json.dumps(named(payload)))
    (tmp_path / "lab.toml").write_text(f'base = "{payload}"\n')
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(lab_files, "FOLDER", tmp_path)
    assert shoal("ps").exit_code == 0
    with pytest.raises(BadInput):
        lab.find_lab("lab")
    assert not (tmp_path / "marker").exists()


ESCAPE = "\x1b[31mred\x1b[2J\r"


def test_escape_sequences_in_names_are_not_printed(tmp_path: Path) -> None:
    record(tmp_path, "ddp")
    trace = tmp_path / "trace.json"
    document = json.loads(trace.read_text())
    document["traceEvents"][0]["args"]["name"] = f"server {ESCAPE}"
    trace.write_text(json.dumps(document))
    (tmp_path / "cluster.toml").write_text('"\\u001b[31mred" = 1\n')
    answers = [
        shoal("timeline", str(tmp_path)),
        shoal("timeline", ESCAPE),
        shoal("report", ESCAPE),
        shoal("cluster", "show", str(tmp_path / "cluster.toml")),
        shoal("keys", "new", str(tmp_path / ESCAPE)),
    ]
    for answer in answers:
        assert "\\x1b[31mred" in answer.stdout + answer.stderr
        assert "\x1b" not in answer.stdout + answer.stderr and "\r" not in answer.stdout
