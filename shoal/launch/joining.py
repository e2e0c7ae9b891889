"""Workers that come after the start of a run: `shoal run -n 4 --start 2`, then `shoal join`.

`shoal join` leaves a request in the run directory; the launcher finds it and starts the worker
with the lowest number that is not there, as one that comes back. So every worker is a child of
its launcher, which forwards its output and ends it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import BadInput
from shoal.runtime.run_dir import RunDir, running_runs

_POLL_S = 0.2


@dataclass(frozen=True)
class JoinRequest:
    """A worker more is asked for."""


class JoinRequests:
    """A thread that looks for requests while the block runs."""

    def __init__(self, run_dir: RunDir, put: Callable[[JoinRequest], None], is_open: bool):
        """`is_open`: workers of this run may come later."""
        self._run_dir = run_dir
        self._put = put
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-join", daemon=True)
        self._is_open = is_open

    def __enter__(self) -> JoinRequests:
        if self._is_open:
            self._run_dir.open_joins()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._is_open:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_POLL_S):
            with suppress(OSError):  # of a full disk, for example: looked for again
                for _ in range(self._run_dir.take_joins()):
                    self._put(JoinRequest())


def ask_to_join(run: Path | None) -> RunDir:
    """Ask a run on this host for one worker more; BadInput where there is none that takes one."""
    found = [RunDir(run)] if run is not None else running_runs()
    takes = [run_dir for run_dir in found if run_dir.takes_joins()]
    if not takes:
        raise BadInput(
            "no run of yours on this host takes a worker: start it with --restart, or with --start "
            "for fewer workers than -n"
        )
    if len(takes) > 1:
        names = ", ".join(str(run_dir.path) for run_dir in takes)
        raise BadInput(f"several runs take a worker: name the folder of one of them: {names}")
    takes[0].ask_for_join()
    return takes[0]
