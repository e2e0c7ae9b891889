"""Small scripts as workers, and a rope that shows when the last process has exited."""

from __future__ import annotations

import os
import random
import select
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.launch.here.local import LaunchSpec, launch
from shoal.launch.here.output import OnProgress
from shoal.launch.losses.lost_workers import RunResult
from shoal.runtime.config import RunConfig

ROOT = Path(__file__).parents[2]
DIE_WITH_LAUNCHER = """
from shoal.runtime.config import RunConfig
from shoal.runtime.parent_death import die_with_launcher
die_with_launcher(RunConfig.from_environment().launcher_pid)
"""


def python(script: str) -> list[str]:
    """A worker: `rank` and `run_dir` are there, and what most scripts import."""
    head = "import os, signal, sys, time\nrank = int(os.environ['SHOAL_RANK'])\n"
    head += "run_dir = os.environ['SHOAL_RUN_DIR']\n"
    return [sys.executable, "-c", head + textwrap.dedent(script)]


class Screen:
    """Keeps what `launch` writes."""

    def __init__(self) -> None:
        self.out = ""
        self.err = ""
        self.result: RunResult

    def __call__(self, text: str, is_stderr: bool) -> None:
        assert text.endswith("\n")
        if is_stderr:
            self.err += text
        else:
            self.out += text


def run(
    script: str,
    workers: int,
    env: dict[str, str] | None = None,
    on_progress: OnProgress | None = None,
    screen: Screen | None = None,
    **options: Any,
) -> Screen:
    """Launch it with the repository on the path; what it printed, also in `screen`."""
    screen = screen or Screen()
    config = RunConfig.from_environment({**os.environ, "PYTHONPATH": str(ROOT), **(env or {})})
    spec = LaunchSpec(python(script), workers, config, **options)
    screen.result = launch(spec, screen, on_progress)
    return screen


class Rope:
    """A named pipe. Each process that holds on to it writes one byte; its end is their end.

    A worker takes it with `rope = os.open(os.environ["ROPE"], os.O_WRONLY); os.write(rope, b"x")`.
    """

    def __init__(self, directory: Path):
        self.path = directory / "rope"
        os.mkfifo(self.path)
        self._read = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        self._own = os.open(self.path, os.O_WRONLY)  # no end before a process holds it

    def wait_held(self, processes: int, seconds: float = 60.0) -> None:
        self.wait_bytes(processes, seconds)
        os.close(self._own)
        self._own = -1

    def wait_bytes(self, count: int, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while count > 0:
            count -= len(self._next(deadline))

    def wait_released(self, seconds: float = 50.0) -> None:
        deadline = time.monotonic() + seconds
        while self._next(deadline):
            pass

    def close(self) -> None:
        for end in (self._read, self._own):
            if end >= 0:
                os.close(end)

    def _next(self, deadline: float) -> bytes:
        ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, "the processes did not do it in time"
        return os.read(self._read, 100)


def free_port() -> int:
    """Below those that the kernel gives out: no other process takes it meanwhile."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(end // 2, end)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("localhost", port))
            return port


HOLD = "rope = os.open(os.environ['ROPE'], os.O_WRONLY); os.write(rope, b'x')\n"


@contextmanager
def launcher(
    script: str, workers: int, rope: Rope, before: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher in a process of its own, to be hit with signals."""
    main = "import sys; from shoal.launch.here.local import LaunchSpec, launch\n"
    main += "from shoal.runtime.config import RunConfig\n" + before
    main += "launch(LaunchSpec(sys.argv[2:], int(sys.argv[1]), RunConfig.from_environment()))"
    process = subprocess.Popen(
        [sys.executable, "-c", main, str(workers), *python(HOLD + textwrap.dedent(script))],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ROPE": str(rope.path),
            "TMPDIR": str(rope.path.parent),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # it takes its workers along
        process.communicate()
