"""Workers that the head gives up: their connections have ended, or they never came to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from shoal.errors import ShoalError
from shoal.server.model.membership import ModelFailure
from shoal.server.model_host import ModelHost
from shoal.server.replicas.elsewhere import Elsewhere
from shoal.server.replicas.operations import EMPTY, Execute, Lost

ABSENT_S = 10.0  # a worker that has not come to a new head after so long is lost
_POLL_S = 0.5


class LostWorkers:
    """A thread that proposes `Lost`; only the head has any effect."""

    def __init__(self, host: ModelHost, is_head: Callable[[], bool], execute: Execute):
        self._host = host
        self._is_head = is_head
        self._execute = execute
        self._is_closed = False
        self._losses: dict[tuple[int, int], str] = {}  # (model, worker) -> reason
        self._absent: dict[tuple[int, int], float] = {}  # (model, worker) -> since when
        self._noted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-loss", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self._noted.set()

    def note(self, model: int, worker: int, reason: str) -> None:
        """Called under the lock of a model: only noted, for a thread without it."""
        self._losses.setdefault((model, worker), reason)
        self._noted.set()

    def forget(self) -> None:
        """This replica has no state any more."""
        self._losses.clear()

    def _run(self) -> None:
        while not self._is_closed:
            self._noted.wait(_POLL_S)
            self._noted.clear()
            self._note_absent()
            for (model, worker), reason in list(self._losses.items()):
                with suppress(Elsewhere, ModelFailure, ShoalError):
                    if self._is_head():
                        self._execute(Lost(model, worker, reason), EMPTY)
                self._losses.pop((model, worker), None)

    def _note_absent(self) -> None:
        """Workers that do not connect to a head that is new to them."""
        present = {
            (number, worker)
            for number, model in list(self._host.models.items())
            for worker, member in list(model.membership.members.items())
            if not member.channels and worker not in model.membership.departed
        }
        now_s = time.monotonic()
        is_head = self._is_head()
        self._absent = {key: self._absent.get(key, now_s) for key in present if is_head}
        for (number, worker), since_s in self._absent.items():
            if now_s - since_s > ABSENT_S:
                reason = f"worker {worker} was lost: it has not come to the new head"
                self._losses.setdefault((number, worker), reason)
