"""The processes of one role in a run: started together, signalled as groups, all reaped.

Each process leads a session of its own, so Ctrl-C in the terminal reaches the launcher alone.
A signal to the process group also reaches its children, such as data loaders.

Workers are forks of a template where there is one, else new processes (see template.py).

A thread for each process waits for its exit. The process stays unreaped until the block ends:
while the zombie exists, the system gives the number of its process group to no other process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple, Self

from shoal.errors import BadInput
from shoal.launch.here.python_fork import Fork, fork_function
from shoal.launch.here.template import Template, close_all
from shoal.runtime.parent_death import in_child

Role = Literal["worker", "server"]
_KILL_S = 2.5  # after SIGKILL only a process that hangs in the kernel is still there


class ProcessExit(NamedTuple):
    """A worker or a server has exited."""

    rank: int
    returncode: int  # as in Popen: -9 for SIGKILL
    noticed_ns: int
    role: Role = "worker"


Process = subprocess.Popen[bytes] | Fork


class Processes:
    """Use as a block: at its end every process and the rest of its group are killed."""

    def __init__(
        self,
        on_exit: Callable[[ProcessExit], None],
        role: Role = "worker",
        template: Template | None = None,
    ):
        """With a template, Python programs are forks of it."""
        self._on_exit = on_exit
        self._role = role
        self._template = template
        self._processes: list[Process] = []
        self._ranks: list[int] = []
        self._is_watched = False
        self._waiters: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        deadline = time.monotonic() + _KILL_S
        for waiter in self._waiters:
            waiter.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if self._waiters:
                process.poll()
            else:
                process.wait()

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        inherited: Sequence[int] = (),
        rank: int | None = None,
    ) -> tuple[int, int]:
        """Start the next process; returns the pipes of its stdout and stderr.

        `inherited` are descriptors that are handed over: the process keeps them open, and here they
        are closed. `rank`: start this one again.
        """
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        given = (out_end, err_end, *inherited)
        process: Process | None = None
        try:
            if self._template is not None and command[0] == sys.executable:
                process = self._template.fork(command, env, given)
            process = process or subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out_end,
                stderr=err_end,
                pass_fds=inherited,
                start_new_session=True,
                preexec_fn=in_child(os.getpid()),
            )
            close_all(given)
        except OSError as error:
            close_all((out, err, *given))
            raise BadInput(f"cannot start {command[0]}: {error.strerror}") from error
        self._add(process, rank)
        return out, err

    def fork(self, body: Callable[..., None], *args: Any) -> None:
        """Start the next process as a fork of this one, which has one thread, and calls `body`."""
        self._add(fork_function(body, *args))

    def _add(self, process: Process, rank: int | None = None) -> None:
        self._ranks.append(len(self._ranks) if rank is None else rank)
        self._processes.append(process)
        if self._is_watched:
            self._watch(self._ranks[-1], process)

    def watch(self) -> None:
        """From now on `on_exit` is called, from a thread, for each process that exits."""
        self._is_watched = True
        for rank, process in zip(self._ranks, self._processes, strict=True):
            self._watch(rank, process)

    def _watch(self, rank: int, process: Process) -> None:
        name = f"shoal-wait-{self._role}-{rank}"
        wait = partial(self._wait, rank, process)
        self._waiters.append(threading.Thread(target=wait, name=name, daemon=True))
        self._waiters[-1].start()

    def pid_of(self, rank: int) -> int:
        """The process that was started last for this rank."""
        return self._processes[max(i for i, r in enumerate(self._ranks) if r == rank)].pid

    def running(self) -> list[tuple[int, int]]:
        """Ranks and ids of the processes that have not been reaped."""
        return [
            (rank, process.pid)
            for rank, process in zip(list(self._ranks), list(self._processes), strict=False)
            if process.returncode is None
        ]

    def host_of(self, rank: int) -> str:
        """Empty: all are on this host."""
        return ""

    def note_exit(self, rank: int) -> None:
        """Processes of this host see in the run directory which others have exited."""

    def signal_alone(self, number: signal.Signals) -> None:
        """Send it to the processes themselves: their data loaders go on."""
        for process in self._processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def signal(self, number: signal.Signals) -> None:
        """Send it to all processes and their children, also where the process has exited."""
        for process in self._processes:
            _signal_group(process, number)

    def _wait(self, rank: int, process: Process) -> None:
        """The others of a run may go on without a process that was killed; its children do not."""
        returncode = _wait_unreaped(process)
        if returncode < 0:
            _signal_group(process, signal.SIGKILL)
        self._on_exit(ProcessExit(rank, returncode, time.monotonic_ns(), self._role))


def _signal_group(process: Process, number: signal.Signals) -> None:
    # unreaped: the process group is still ours
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _wait_unreaped(process: Process) -> int:
    if process.returncode is not None:
        return process.returncode
    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert end is not None  # None comes with WNOHANG only
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
