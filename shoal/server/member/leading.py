"""What a head does beside serving workers: it closes steps that wait for norms, and follows.

A thread looks at all models when something has changed, and from time to time: a copy that
becomes the head finds the work that the head before it has left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from shoal.errors import ShoalError
from shoal.protocol.endpoint import PLAIN
from shoal.runtime.config import TlsConfig
from shoal.server.member.operations import Decided, Payload, StepClosed
from shoal.server.member.place import Elsewhere
from shoal.server.member.runtime import ChainRuntime
from shoal.server.messages import LogEntry
from shoal.server.model.membership import ModelFailure
from shoal.server.model.served_model import ServedModel
from shoal.server.process.log_stream import Follower

_POLL_S = 0.25


class Leading:
    """One thread, and one more for each model that is followed."""

    def __init__(
        self,
        runtime: ChainRuntime,
        address: Callable[[int], str | None],
        secret: bytes,
        tls: TlsConfig = PLAIN,
    ):
        """`address` of a process; those of shard 0 come first."""
        self._runtime = runtime
        self._address = address
        self._secret = secret
        self._tls = tls
        self._following: dict[int, tuple[ServedModel, Follower]] = {}
        self._closing: dict[int, threading.Thread] = {}
        self._is_closed = False
        self._poked = threading.Event()
        runtime.on_applied = self._note_applied
        self._thread = threading.Thread(target=self._run, name="shoal-leading", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, join_s: float) -> None:
        self._is_closed = True
        self._poked.set()
        self._thread.join(join_s)
        for _, follower in self._following.values():
            follower.close()
        for _, follower in self._following.values():
            follower.join(join_s)
        for thread in self._closing.values():
            thread.join(join_s)

    def _run(self) -> None:
        while not self._is_closed:
            if self._runtime.is_head:
                for number, model in list(self._runtime.host.models.items()):
                    self._look_at(number, model)
            self._poked.wait(_POLL_S)
            self._poked.clear()

    def _note_applied(self) -> None:
        """Called after every operation: the thread is woken only where it has something to do."""
        for number, model in self._runtime.host.models.items():
            is_new = not model.is_leader and number not in self._following
            if is_new or model.state.open_step is not None:
                self._poked.set()

    def _look_at(self, number: int, model: ServedModel) -> None:
        if not model.is_leader:
            self._follow(number, model)
        elif model.state.open_step is not None and not self._is_closing(number):
            thread = threading.Thread(
                target=self._close_step, args=(number, model), name="shoal-step", daemon=True
            )
            self._closing[number] = thread
            thread.start()

    def _is_closing(self, number: int) -> bool:
        return number in self._closing and self._closing[number].is_alive()

    def _close_step(self, number: int, model: ServedModel) -> None:
        with suppress(ShoalError, ModelFailure, Elsewhere):
            while True:
                with model.lock:
                    step = model.log.open_step()
                if step is None:
                    return
                self._runtime.execute(StepClosed(number, step), Payload())

    def _follow(self, number: int, model: ServedModel) -> None:
        known = self._following.get(number)
        if known is not None and known[0] is model and known[1].is_alive:
            return
        if known is not None:
            known[1].close()
        runtime = self._runtime

        def replay(entry: LogEntry) -> None:
            if entry.position > model.log.position:
                runtime.execute(Decided(number, entry), Payload())

        follower = Follower(
            model,
            number,
            self._secret,
            self._tls,
            replay,
            lambda attempt: self._address(attempt % runtime.place.copies),
            lambda: runtime.is_head and runtime.host.models.get(number) is model,
        )
        self._following[number] = (model, follower)
