"""Workers as forks of one process, the template, which has imported torch for all of them.

    launcher ── command, environment, descriptors ──> template ── fork ──> worker
       └───────────────────────────── parent of ─────────────────────────────┘

The template is a new interpreter with the environment of the workers, and has one thread. A worker
is the launcher's own child, as one that was spawned is: the template forks twice and the process
between ends, so the kernel hands the worker to its nearest ancestor that asked for it, the launcher
(PR_SET_CHILD_SUBREAPER). Where the template does not fork, for the script is none that can be, or
for it has ended, the launcher spawns the worker instead.

A worker's process id comes through a pipe. A signal that comes while the template loads ends it,
and so the wait (`cancel`).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from shoal.launch.here.python_fork import Fork, be_python, has_use, load
from shoal.runtime.config import RunConfig
from shoal.runtime.parent_death import die_with, in_child

_SERVE = "from shoal.launch.here.template import serve; serve()"
_REQUEST_BYTES = 128 * 1024
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
# code, data, heap and stack in /proc/PID/stat (fields from 1), in the order of PR_SET_MM_MAP
_MEMORY_FIELDS = (26, 27, 45, 46, 47, 28)
_NO_FILE = 0xFFFFFFFF
_shown: object = None  # memory in which the kernel finds the command of this process


class Template:
    """A process that loads torch, and forks workers from then on. Use as a block."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], is_kept: bool = False):
        """`command`: one that it will run, whose imports are loaded, too.

        `is_kept`: workers may be asked for after the first ones have started.
        """
        self._env = dict(env)
        self._is_kept = is_kept
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [str(theirs.fileno()), str(os.getpid()), *command]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, *words],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=in_child(os.getpid()),
            )
        self.has_forked = False
        self._is_canceled = False

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._channel.close()
        self._process.wait()

    def cancel(self) -> None:
        """Workers that are not there yet will not be."""
        self._is_canceled = True
        self._process.kill()

    def have_started(self) -> None:
        """All workers have been asked for: it ends when it has forked them, unless it is kept."""
        if not self._is_kept:
            with suppress(OSError):  # it has ended
                self._channel.shutdown(socket.SHUT_WR)

    def fork(
        self, command: Sequence[str], env: Mapping[str, str], given: Sequence[int]
    ) -> Fork | None:
        """A process; `given` become its stdout and stderr, and others keep their numbers.

        None where the launcher has to spawn it.
        """
        changed = {name: text for name, text in env.items() if self._env.get(name) != text}
        request = {"command": command, "env": changed, "without": list(self._env.keys() - env)}
        text = json.dumps({**request, "numbers": given[2:]}).encode()
        number = self._ask(text, given) if len(text) < _REQUEST_BYTES else b""
        if number:
            self.has_forked = True
            if self._is_canceled:
                os.killpg(int(number), signal.SIGKILL)
            return Fork(int(number))
        return Fork(0, -signal.SIGKILL) if self._is_canceled else None

    def _ask(self, text: bytes, given: Sequence[int]) -> bytes:
        """The process id, as soon as it is there; none where the template has ended."""
        reply, reply_end = os.pipe()
        with _adopting, open(reply, "rb", buffering=0) as replies:
            _adopt(True)
            try:
                with suppress(OSError):  # it has ended
                    socket.send_fds(self._channel, [text], [reply_end, *given])
                os.close(reply_end)
                return replies.read(32)
            finally:
                _adopt(False)


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


_adopting = threading.Lock()


def _adopt(is_on: bool) -> None:
    """While a worker is awaited, it becomes a child of this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


# ------------------------------------------------------------------ in the template


def serve() -> None:
    """Load, and fork for each request, until the launcher asks for no more."""
    number, launcher, *command = sys.argv[1:]
    channel = socket.socket(fileno=int(number))
    env = RunConfig.from_environment().to_environment()
    if not has_use(command) or not load(command):
        return
    while True:
        text, descriptors, _, _ = socket.recv_fds(channel, _REQUEST_BYTES, 16)
        if not text:
            return
        asked = json.loads(text)
        own = {name: value for name, value in env.items() if name not in asked["without"]}
        _fork_for(int(launcher), {**asked, "env": {**own, **asked["env"]}}, descriptors)
        close_all(descriptors)


def _fork_for(launcher: int, request: Mapping[str, Any], descriptors: list[int]) -> None:
    """Fork twice: the worker goes on when the process between has ended."""
    go, go_end = os.pipe()
    between = os.fork()
    if not between:
        if not os.fork():
            os.close(go_end)
            os.read(go, 1)
            _become(launcher, request, descriptors)
        os._exit(0)
    os.waitpid(between, 0)
    os.close(go_end)
    os.close(go)


def _become(launcher: int, request: Mapping[str, Any], descriptors: list[int]) -> NoReturn:
    """In the worker, which the launcher now is the parent of."""
    os.setsid()
    die_with(launcher)
    os.write(descriptors[0], str(os.getpid()).encode())
    command = request["command"]
    numbers = request["numbers"]
    beyond = max([2, *numbers]) + 1  # what has other numbers now may be in the way
    out, err, *others = (fcntl.fcntl(each, fcntl.F_DUPFD, beyond) for each in descriptors[1:])
    for number, descriptor in zip(numbers, others, strict=True):
        os.dup2(descriptor, number)
    sys.orig_argv = list(command)
    with suppress(OSError, ValueError, AttributeError):  # without it: that of the template
        _show_as(command, request["env"])
    stdin = os.open(os.devnull, os.O_RDONLY)
    be_python(command[1:], request["env"], (stdin, out, err), numbers)


def _show_as(command: Sequence[str], env: Mapping[str, str]) -> None:
    """To `ps` and `top`: what /proc/self/cmdline and environ say, where the kernel allows it."""
    global _shown
    texts = (command, [f"{name}={value}" for name, value in env.items()])
    words, variables = (b"".join(os.fsencode(text) + b"\0" for text in each) for each in texts)
    _shown = ctypes.create_string_buffer(words + variables)
    start = ctypes.addressof(_shown)
    middle = ctypes.addressof(_shown) + len(words)
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    places = [int(stat[field - 3]) for field in _MEMORY_FIELDS]
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    places[5:5] = [libc.sbrk(0)]
    memory_map = struct.pack(
        "12Q2I", *places, start, middle, middle, middle + len(variables), 0, 0, _NO_FILE
    )
    size = ctypes.c_ulong(len(memory_map))
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, memory_map, size, 0)
