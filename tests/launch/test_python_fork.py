"""A fork of a process that has loaded torch behaves as a new Python process does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.here import python_fork
from shoal.launch.here.python_fork import imports_of
from tests import forked

STARTS = """
import json, sys
from shoal.errors import ShoalError
from shoal.launch.here.local import LaunchSpec, launch
from shoal.launch.here.python_fork import can_fork, load
from shoal.runtime.config import RunConfig

command = [sys.executable, "script.py", "--lr", "1"]
load(command)
assert can_fork(command)
ends = []
for forks in (True, False):
    lines = []
    try:
        spec = LaunchSpec(command, 1, RunConfig.from_environment(), forks=forks)
        launch(spec, lambda text, is_stderr: lines.append((is_stderr, text)))
        error = ""
    except ShoalError as failure:
        error = str(failure)
    out = "".join(text for is_stderr, text in lines if not is_stderr)
    err = "".join(text for is_stderr, text in lines if is_stderr)
    ends.append([out, err, error])
print(json.dumps(ends))
"""


def ends(tmp_path: Path, script: str, run: Any = forked.run) -> list[Any]:
    """Output, errors and failure of the script in a fork, and in a new process."""
    (tmp_path / "script.py").write_text(script)
    done = run(
        [sys.executable, "-c", STARTS], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


LOOKS = """
import atexit, multiprocessing, os, signal, sys, tempfile, weakref
import torch
print(__name__, __file__, sys.argv, sys.path[0] == os.getcwd(), len(sys.stdin.read()))
print(os.getsid(0) == os.getpid(), multiprocessing.current_process().name, sorted(os.environ))
print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])
print(torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]))
print(sys.modules["__main__"].__dict__ is globals(), sys.excepthook is sys.__excepthook__)
import shoal
import numpy, random
print(numpy.random.rand(), random.random())
atexit.register(print, "at the end")
class Kept: pass
kept = Kept()
weakref.finalize(kept, print, "a finalizer")
"""


LASTS = ["", "sys.exit(0)", "sys.exit(3)", "sys.exit('a sentence')", "1 / 0"]
LASTS += ["raise shoal.BadInput(1)"]


@pytest.mark.whole
@pytest.mark.parametrize("last", LASTS)
def test_a_fork_is_what_a_new_process_is(tmp_path: Path, last: str) -> None:
    in_fork, in_process = ends(tmp_path, LOOKS + last, subprocess.run)
    for one, other in zip(in_fork, in_process, strict=True):
        assert sorted(one.splitlines()) == sorted(other.splitlines())
    assert "at the end" in in_fork[0] and "a finalizer" in in_fork[0]
    assert "runpy" not in in_fork[2]


DRAWS = """
import numpy, random, torch
print(torch.initial_seed(), numpy.random.rand(), random.random())
import shoal
"""


def test_what_is_drawn_before_shoal_is_imported_is_drawn_afresh(tmp_path: Path) -> None:
    first, second = ends(tmp_path, DRAWS)
    assert not set(first[0].split()) & set(second[0].split())


@pytest.mark.parametrize(
    ("script", "is_loaded"),
    [("import own, colorsys", True), ("import os, colorsys\nos.environ['MODE'] = 'fast'", False)],
)
def test_installed_modules_are_loaded_unless_the_environment_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, is_loaded: bool
) -> None:
    monkeypatch.setattr(python_fork, "_GPUS", ())  # beside a GPU nothing is loaded
    (tmp_path / "own.py").write_text("")
    (tmp_path / "script.py").write_text(script)
    names = imports_of([sys.executable, str(tmp_path / "script.py")])
    assert names == (["colorsys"] if is_loaded else [])


REFUSES = """
import sys, threading
from pathlib import Path
from shoal.launch.here.python_fork import can_fork, load
Path("script.py").write_text("")
command = [sys.executable, "script.py"]
load(command)
assert can_fork(command)
assert not can_fork(["sh", "script.py"])
Path("numpy.py").write_text("")
assert not can_fork(command), "the script would get its own numpy"
Path("numpy.py").unlink()
over = threading.Event()
thread = threading.Thread(target=over.wait)
thread.start()
assert not can_fork(command), "a fork has one thread"
over.set()
thread.join()
"""


def test_a_process_with_threads_or_other_modules_is_not_forked(tmp_path: Path) -> None:
    done = forked.run(
        [sys.executable, "-c", REFUSES], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
