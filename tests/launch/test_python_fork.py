"""A fork of a process that has loaded torch behaves as a new Python process does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.here import python_fork
from shoal.launch.here.python_fork import has_use, imports_of
from tests import forked

STARTS = """
import json, sys
from dataclasses import replace
from shoal.errors import ShoalError
from shoal.launch.here.local import LaunchSpec, launch, template_of
from shoal.runtime.config import RunConfig

command = [sys.executable, "script.py", "--lr", "1"]
config = RunConfig.from_environment().with_environ(OMP_NUM_THREADS="3")
ends = []
with template_of(command, replace(config, start_method="fork"), True) as template:
    for used in (template, None):
        lines = []
        try:
            spec = LaunchSpec(command, 1, config, template=used)
            launch(spec, lambda text, is_stderr: lines.append((is_stderr, text)))
            error = ""
        except ShoalError as failure:
            error = str(failure)
        out = "".join(text for is_stderr, text in lines if not is_stderr)
        err = "".join(text for is_stderr, text in lines if is_stderr)
        ends.append([out, err, error])
    assert template.has_forked
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
import atexit, gc, multiprocessing, os, signal, sys, tempfile, threading, weakref
import torch
print(__name__, __file__, sys.argv, sys.orig_argv, sys.path, len(sys.stdin.read()))
print(os.getsid(0) == os.getpid(), os.getppid(), os.getcwd(), os.sched_getaffinity(0))
print(multiprocessing.current_process().name, sorted(os.environ), threading.active_count())
print(open("/proc/self/cmdline").read(), open("/proc/self/comm").read(), os.umask(0))
print(sorted(open("/proc/self/environ").read().split(chr(0))) == sorted(
    ["", *(f"{name}={text}" for name, text in os.environ.items())]))
print([signal.getsignal(n) for n in range(1, 32) if n not in (9, 19)])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), sys.flags, hash("a word"))
print([os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in sorted(os.listdir("/proc/self/fd"))
       if os.path.exists(f"/proc/self/fd/{n}")])
print(torch.get_num_threads(), torch.ones(10_000_000).sum(), torch.get_num_interop_threads())
print(sys.modules["__main__"].__dict__ is globals(), sys.excepthook is sys.__excepthook__)
print(sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering, sys.stderr.errors)
print(sorted(name for name in globals() if name.startswith("__")), __builtins__)
import shoal
import numpy, random
print(numpy.random.rand(), random.random(), torch.initial_seed() == torch.initial_seed())
atexit.register(print, "at the end")
class Kept: pass
kept = Kept()
weakref.finalize(kept, print, "a finalizer")
"""


LASTS = ["", "sys.exit(0)", "sys.exit(3)", "sys.exit('a sentence')", "1 / 0"]
LASTS += ["raise shoal.BadInput(1)", "os.kill(os.getpid(), 15)"]


@pytest.mark.whole
@pytest.mark.parametrize("last", LASTS)
def test_a_fork_is_what_a_new_process_is(tmp_path: Path, last: str) -> None:
    in_fork, in_process = ends(tmp_path, LOOKS + last, subprocess.run)
    for one, other in zip(in_fork, in_process, strict=True):
        assert Counter(one.splitlines()) == Counter(other.splitlines())
    has_ended = "kill" not in last
    assert ("at the end" in in_fork[0] and "a finalizer" in in_fork[0]) is has_ended
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
    ("script", "is_used"),
    [
        ("import torch", True),
        ("import shoal, os\nprint(os.environ['HOME'], os.environ.get('RANK'))", True),
        ("print(1)", False),  # has no use for torch
        ("import torch, os\nos.environ['MODE'] = 'fast'", False),
        ("import torch, os\ndel os.environ['MODE']", False),
        ("import torch\nfrom os import environ\nenviron.setdefault('MODE', 'fast')", False),
        ("import torch, os\nos.putenv('MODE', 'fast')", False),
        ("import torch oh", False),
    ],
)
def test_a_script_that_sets_variables_or_has_no_use_for_torch_is_spawned(
    tmp_path: Path, script: str, is_used: bool
) -> None:
    (tmp_path / "script.py").write_text(script)
    assert has_use([sys.executable, str(tmp_path / "script.py")]) is is_used
    assert has_use([sys.executable, "-c", script]) is is_used


@pytest.mark.parametrize(
    ("command", "is_used"),
    [
        (["-m", "shoal.commands.examples.digits"], True),
        (["-m", "shoal.commands"], False),
        (["-m", "nothing.of.that.name"], False),
        (["nothing.py"], False),
        (["-m"], False),
    ],
)
def test_a_module_is_read_without_its_package_being_imported(
    command: list[str], is_used: bool
) -> None:
    assert has_use([sys.executable, *command]) is is_used


@pytest.mark.parametrize(
    ("gpus", "names"), [((), ["colorsys", "networkx"]), (("/",), ["colorsys"])]
)
def test_installed_modules_are_loaded_and_beside_a_gpu_those_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], names: list[str]
) -> None:
    monkeypatch.setattr(python_fork, "_GPUS", gpus)
    (tmp_path / "own.py").write_text("")
    (tmp_path / "script.py").write_text("import own, colorsys, networkx")
    assert imports_of([sys.executable, str(tmp_path / "script.py")]) == names


REFUSES = """
import sys, threading
from pathlib import Path
from shoal.launch.here.python_fork import can_fork, load
Path("script.py").write_text("import opens")
command = [sys.executable, "script.py"]
assert load(command)
Path("numpy.py").write_text("")
assert not can_fork(command), "the script would get its own numpy"
Path("numpy.py").unlink()
over = threading.Event()
thread = threading.Thread(target=over.wait)
thread.start()
assert not can_fork(command), "a fork has one thread"
over.set()
thread.join()
import shoal.launch.here.python_fork as python_fork
Path("opens.py").write_text("file = open('/dev/null')")
python_fork._is_installed = lambda name: True
python_fork._GPUS = ()
assert not load(command), "a module has opened a device"
"""


def test_a_process_with_threads_or_devices_or_other_modules_is_not_forked(tmp_path: Path) -> None:
    done = forked.run(
        [sys.executable, "-c", REFUSES], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
