"""A process with torch loaded, whose forks stand for new Python processes.

A fork starts in milliseconds; a new interpreter spends 3 s of CPU on importing torch. The fork
behaves as `python ARGS` does: its arguments, environment, folder and standard streams are those
of the request. Processes that it starts itself by `subprocess`, such as workers, are forks of
it in turn, as long as it has a single thread; afterwards they are new interpreters.

    test ── request, streams, status ──> zygote ── fork ──> launcher ── fork ──> workers
"""

from __future__ import annotations

import array
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from shoal.commands.cli import COMMANDS, build_app
from shoal.launch.here.python_fork import be_python
from tests.failpoints import arm_program

REQUEST_BYTES = 1 << 20
_PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "numpy",
    "networkx",
    "safetensors.torch",
    "shoal.worker.run",
    "shoal.server.process.server",
)
_RealPopen = subprocess.Popen


def main() -> None:
    """Serve requests from the socket that is descriptor `argv[1]` until its other end is closed."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in _PRELOADED:
        __import__(name)
    with suppress(ImportError):  # typer loads it when a command is called
        __import__("typer._adapters")
    build_app(COMMANDS)  # which loads all of them
    gc.collect()
    gc.freeze()  # what is loaded stays: a fork that looked through it would copy all of it
    statuses: dict[int, int] = {}  # pid -> where its exit status is awaited
    wakeup, wakeup_end = os.pipe()
    os.set_blocking(wakeup_end, False)
    signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    channel.send(b"ready")
    while True:
        ready, _, _ = select.select([channel, wakeup], [], [])
        if wakeup in ready:
            os.read(wakeup, 4096)
            _report_ends(statuses)
        if channel in ready and not _answer(channel, statuses):
            return


def _answer(channel: socket.socket, statuses: dict[int, int]) -> bool:
    """Fork for one request; False when there will be no more of them."""
    text, descriptors = _receive(channel)
    if not text:
        return False
    *streams, status = descriptors
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        become(Request(**json.loads(text), streams=streams))
    os.write(status, f"{pid}\n".encode())
    statuses[pid] = status
    for descriptor in streams:
        os.close(descriptor)
    return True


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(4 * descriptors.itemsize)
    text, control, _, _ = channel.recvmsg(REQUEST_BYTES, room)
    for _, _, data in control:
        descriptors.frombytes(data)
    return text, list(descriptors)


def _report_ends(statuses: dict[int, int]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        waiting = statuses.pop(pid)
        with suppress(BrokenPipeError):  # the test has given up
            os.write(waiting, f"{status}\n".encode())
        os.close(waiting)


@dataclass(frozen=True)
class Request:
    """What a new Python process is to be."""

    args: Sequence[str]
    env: Mapping[str, str]
    cwd: str | None
    streams: Sequence[int]
    keep: Sequence[int] = ()
    session: bool = False


def become(request: Request) -> NoReturn:
    """In a fork: be `python ARGS` until it ends. The stack above is never returned to."""
    if request.session:
        os.setsid()
    if request.cwd is not None:
        os.chdir(request.cwd)

    def before() -> None:
        subprocess.Popen = Fork  # type: ignore[misc]
        if "OMP_NUM_THREADS" not in request.env:
            sys.modules["torch"].set_num_threads(len(os.sched_getaffinity(0)))  # type: ignore[attr-defined]
        paths = request.env.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [path for path in paths if path and path not in sys.path[1:]]
        arm_program(request.args)

    be_python(request.args, request.env, request.streams, request.keep, before)


class Fork(_RealPopen):  # type: ignore[type-arg]
    """Popen in a fork: `python ARGS` is a fork of this process while it has one thread."""

    def _execute_child(self, *given: Any) -> None:
        names = _RealPopen._execute_child.__code__.co_varnames[1 : len(given) + 1]  # type: ignore[attr-defined]
        asked = dict(zip(names, given, strict=True))
        args = asked["args"] if isinstance(asked["args"], list | tuple) else [asked["args"]]
        args = [os.fspath(arg) for arg in args]
        takes_script = len(args) > 1 and (args[1] in ("-m", "-c") or not args[1].startswith("-"))
        if args[0] != sys.executable or not takes_script or threading.active_count() > 1:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            become(_request(args[1:], asked))
        self.pid = pid
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]


def _request(args: list[str], asked: dict[str, Any]) -> Request:
    ends = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
    return Request(
        args=args,
        env=dict(os.environ if asked["env"] is None else asked["env"]),
        cwd=None if asked["cwd"] is None else os.fspath(asked["cwd"]),
        streams=[end if end != -1 else number for number, end in enumerate(ends)],
        keep=tuple(asked["pass_fds"]),
        session=bool(asked["start_new_session"]),
    )


if __name__ == "__main__":
    main()
