"""The processes of one role in a run: started together, signalled as groups, all reaped.

Each worker leads a session of its own, so Ctrl-C in the terminal reaches the launcher alone,
and a signal to the worker's group also reaches the children it has made (data loaders).

A thread per worker waits for its end but leaves it unreaped until the crew is closed: as long
as the dead leader is there, the system gives its process group's number to nobody else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from shoal.errors import BadInput

Role = Literal["worker", "server"]
_KILL_S = 2.5  # after SIGKILL only a worker that hangs in the kernel is still there


class Exit(NamedTuple):
    """A worker, or a server, has ended."""

    rank: int
    returncode: int  # as of Popen: -9 for SIGKILL
    noticed_ns: int
    role: Role = "worker"


class Crew:
    """Use as a block: at its end every worker and what is left of its group is killed."""

    def __init__(self, on_exit: Callable[[Exit], None], role: Role = "worker"):
        self._on_exit = on_exit
        self._role = role
        self._workers: list[subprocess.Popen[bytes]] = []
        self._waiters: list[threading.Thread] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        deadline = time.monotonic() + _KILL_S
        for waiter in self._waiters:
            waiter.join(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            if self._waiters:
                worker.poll()
            else:
                worker.wait()

    def add(
        self, command: Sequence[str], env: Mapping[str, str], keep: Sequence[int] = ()
    ) -> tuple[int, int]:
        """Start the next worker; returns the pipes of its stdout and stderr.

        `keep` are descriptors that the worker inherits.
        """
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        try:
            worker = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out_end,
                stderr=err_end,
                pass_fds=keep,
                start_new_session=True,
            )
        except OSError as error:
            os.close(out)
            os.close(err)
            raise BadInput(f"cannot start {command[0]}: {error.strerror}") from error
        finally:
            os.close(out_end)
            os.close(err_end)
        self._workers.append(worker)
        return out, err

    def watch(self) -> None:
        """From now on `on_exit` is called, from a thread, for each worker that ends."""
        for rank, worker in enumerate(self._workers):
            waiter = threading.Thread(
                target=self._wait,
                args=(rank, worker),
                name=f"shoal-wait-{self._role}-{rank}",
                daemon=True,
            )
            waiter.start()
            self._waiters.append(waiter)

    def signal(self, number: signal.Signals) -> None:
        """Send it to all workers and their children, also to those of workers that have ended."""
        for worker in self._workers:
            if worker.returncode is None:  # unreaped: the group is still ours
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, number)

    def _wait(self, rank: int, worker: subprocess.Popen[bytes]) -> None:
        returncode = _wait_unreaped(worker)
        self._on_exit(Exit(rank, returncode, time.monotonic_ns(), self._role))


def _wait_unreaped(worker: subprocess.Popen[bytes]) -> int:
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return worker.wait()
    end = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert end is not None  # only None with WNOHANG
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
