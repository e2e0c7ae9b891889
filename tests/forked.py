"""`subprocess.run` and `Popen` for Python programs that need torch: forks of a zygote.

`run([sys.executable, "-m", "shoal", …])` takes the place of `subprocess.run`: see `zygote`. Tests
that are about starting a program (its imports, its signals) use subprocess itself.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.zygote import _RealPopen, _request

ROOT = Path(__file__).parents[1]


class Zygote:
    """Started once for each process of the test run; ends when that process does."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.zygote", str(theirs.fileno())],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        assert self._channel.recv(16) == b"ready", "the zygote did not start"

    def fork(self, request: dict[str, Any], streams: list[int]) -> tuple[int, int]:
        """The process id of a fork, and the pipe in which its exit status will come."""
        status, status_end = os.pipe()
        descriptors = array.array("i", [*streams, status_end])
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        self._channel.sendmsg([json.dumps(request).encode()], control)
        os.close(status_end)
        return _read_line(status), status


@cache
def zygote() -> Zygote:
    return Zygote()


def zygotes() -> set[int]:
    """The process that a test may leave behind for those after it."""
    return {zygote().process.pid} if zygote.cache_info().currsize else set()


class Popen(_RealPopen):  # type: ignore[type-arg]
    """A Python program as a fork of the zygote."""

    def _execute_child(self, *given: Any) -> None:
        names = _RealPopen._execute_child.__code__.co_varnames[1 : len(given) + 1]  # type: ignore[attr-defined]
        asked = dict(zip(names, given, strict=True))
        args = [os.fspath(arg) for arg in asked["args"]]
        assert args[0] == sys.executable, f"{args[0]} is not the Python of the tests"
        request = _request(args[1:], asked)
        assert not request.keep, "a fork of the zygote inherits the standard streams alone"
        document = {"args": request.args, "env": request.env, "session": request.session}
        document["cwd"] = request.cwd or os.getcwd()
        self.pid, self._status = zygote().fork(document, list(request.streams))
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self._try_wait(os.WNOHANG)
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """As of Popen: (pid, status), or (0, 0) while it runs."""
        timeout_s = 0 if flags & os.WNOHANG else None
        if not select.select([self._status], [], [], timeout_s)[0]:
            return 0, 0
        status = _read_line(self._status)
        os.close(self._status)
        self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.pid, status


def _read_line(pipe: int) -> int:
    text = b""
    while not text.endswith(b"\n"):
        byte = os.read(pipe, 1)
        assert byte, "the zygote has ended"
        text += byte
    return int(text)


def run(
    command: list[str], *, timeout: float | None = None, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`."""
    if options.pop("capture_output", False):
        options["stdout"] = subprocess.PIPE
        options["stderr"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
