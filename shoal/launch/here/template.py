"""Workers as forks of one process, the template, which has imported torch for all of them.

    launcher ── command, environment, descriptors ──> template ── fork ──> worker
       └───────────────────────────── parent of ─────────────────────────────┘

The template is a new interpreter with the environment of the workers, and has one thread. A worker
is the launcher's own child, as one that was spawned is: the template forks twice and the process
between ends, so the kernel hands the worker to its nearest ancestor that asked for it, the launcher
(PR_SET_CHILD_SUBREAPER). Where the template does not fork, for the script is none that can be, or
for it has ended, the launcher spawns the worker instead.

The launcher does not wait for the template to load: a worker's process id comes through a pipe.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from shoal.launch.here.python_fork import Fork, be_python, has_use, load
from shoal.runtime.config import RunConfig
from shoal.runtime.parent_death import die_with, in_child

_SERVE = "from shoal.launch.here.template import serve; serve()"
_REQUEST_BYTES = 128 * 1024
_PR_SET_CHILD_SUBREAPER, _PR_SET_MM, _PR_SET_MM_MAP = 36, 35, 14
# code, data, heap and stack in /proc/PID/stat (fields from 1), in the order of PR_SET_MM_MAP
_MEMORY_FIELDS = (26, 27, 45, 46, 47, 28)
_NO_FILE = 0xFFFFFFFF
_shown: object = None  # memory in which the kernel finds the command of this process

Spawn = Callable[[], "subprocess.Popen[bytes]"]


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

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._channel.close()
        self._process.wait()

    def kill(self) -> None:
        """Workers that were asked for and are not there yet will not be."""
        self._process.kill()

    def have_started(self) -> None:
        """All workers have been asked for: it ends when it has forked them, unless it is kept."""
        if not self._is_kept:
            with suppress(OSError):  # it has ended
                self._channel.shutdown(socket.SHUT_WR)

    def fork(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        given: Sequence[int],
        spawn: Spawn,
    ) -> Forked:
        """Ask for a process; `given` become its stdout and stderr, and others keep their numbers.

        `spawn` starts it where the template cannot.
        """
        changed = {name: text for name, text in env.items() if self._env.get(name) != text}
        request = {"command": command, "env": changed, "without": list(self._env.keys() - env)}
        reply, reply_end = os.pipe()
        text = json.dumps({**request, "numbers": given[2:]}).encode()
        _adopt(1)
        try:
            if len(text) < _REQUEST_BYTES:
                with suppress(OSError):  # it has ended
                    socket.send_fds(self._channel, [text], [reply_end, *given])
        finally:
            os.close(reply_end)
        return Forked(self, reply, given, spawn)


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class Forked:
    """What `Processes` uses of a Popen, of a process that its template has been asked for."""

    def __init__(self, template: Template, reply: int, given: Sequence[int], spawn: Spawn):
        self._template = template
        self._reply = reply
        self._given = given
        self._spawn = spawn
        self._process: Fork | subprocess.Popen[bytes] | None = None
        self._canceled: int | None = None
        self._waiting = threading.Lock()
        self._changing = threading.Lock()

    @property
    def is_there(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        return self.awaited().pid

    @property
    def returncode(self) -> int | None:
        return None if self._process is None else self._process.returncode

    def poll(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def wait(self) -> int:
        return self.awaited().wait()

    def awaited(self) -> Fork | subprocess.Popen[bytes]:
        """The process itself, as soon as it is there."""
        with self._waiting:
            if self._process is None:
                number = os.read(self._reply, 32)
                os.close(self._reply)
                _adopt(-1)
                with self._changing:
                    self._process = self._found(number)
                close_all(self._given)
            return self._process

    def _found(self, number: bytes) -> Fork | subprocess.Popen[bytes]:
        process = Fork(int(number or 0))
        if number:
            self._template.has_forked = True
            if self._canceled is not None:
                os.killpg(process.pid, self._canceled)
        elif self._canceled is not None:
            process.returncode = -self._canceled
        else:
            return self._spawn()
        return process

    def cancel(self, number: int) -> bool:
        """End it by this signal if it is not there yet; False if it is."""
        with self._changing:
            if self._process is not None:
                return False
            self._canceled = number
        self._template.kill()
        return True


_adopting = threading.Lock()
_awaited = 0


def _adopt(more: int) -> None:
    """While workers are awaited, those whose parents end become children of this process."""
    global _awaited
    with _adopting:
        _awaited += more
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(_awaited > 0), 0, 0, 0)


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
    command, numbers = request["command"], request["numbers"]
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
    start, middle = ctypes.addressof(_shown), ctypes.addressof(_shown) + len(words)
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    places = [int(stat[field - 3]) for field in _MEMORY_FIELDS]
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    places[5:5] = [libc.sbrk(0)]
    shown = (start, middle, middle, middle + len(variables))
    memory_map = struct.pack("12Q2I", *places, *shown, 0, 0, _NO_FILE)
    size = ctypes.c_ulong(len(memory_map))
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, memory_map, size, 0)
