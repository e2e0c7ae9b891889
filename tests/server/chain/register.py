"""A coordinator: a configuration with compare-and-set, leases, answers that come late or never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.server.chain import ChainConfig
from tests.server.chain.loop import Loop, Process

TTL_S = 0.040
ANSWER_S = 0.001  # mean, each way
PATIENCE_S = 0.015  # of those who ask


class View(NamedTuple):
    config: ChainConfig | None
    version: int
    alive: dict[int, int]
    unreachable: dict[int, tuple[int, ...]]


class Register:
    """The store. Its clock is the world's."""

    def __init__(self, loop: Loop):
        self.loop = loop
        self.config: ChainConfig | None = None
        self.version = 0
        self.heads: set[int | None] = set()
        self._leases: dict[int, tuple[int, float]] = {}  # replica: incarnation, end
        self._unreachable: dict[int, tuple[int, ...]] = {}  # what each says of others

    def view(self) -> View:
        now_s = self.loop.now_s
        alive = {r: inc for r, (inc, end_s) in self._leases.items() if end_s > now_s}
        return View(self.config, self.version, alive, dict(self._unreachable))

    def grant(self, replica: int, incarnation: int, unreachable: tuple[int, ...]) -> float:
        if incarnation >= self._leases.get(replica, (0, 0.0))[0]:  # not from an earlier life
            self._leases[replica] = (incarnation, self.loop.now_s + TTL_S)
            self._unreachable[replica] = unreachable
        return TTL_S

    def keep_alive(
        self, replica: int, incarnation: int, unreachable: tuple[int, ...]
    ) -> float | None:
        """None if the lease has ended."""
        if self.view().alive.get(replica) != incarnation:
            return None
        return self.grant(replica, incarnation, unreachable)

    def swap(self, config: ChainConfig, version: int) -> int | None:
        """The new version; None if there is another one than `version`."""
        if version != self.version:
            return None
        assert config.epoch == (self.config.epoch if self.config else 0) + 1
        self.version += 1
        self.config = config
        self.heads.add(config.head)
        return self.version


class Requests:
    """How replicas reach a store: late, not at all, or without learning the answer."""

    def __init__(self, loop: Loop, store: Any, loss: float):
        self.loop = loop
        self.store = store
        self.loss = loss
        self.is_up = True
        self.slow = loop.rng.choice((0.02, 0.02, 0.3))  # the share of late messages
        self.cut: set[Process] = set()  # reach it no more

    def call(
        self,
        process: Process,
        request: Callable[[], Any],
        answered: Callable[[Any], None],
        unanswered: Callable[[], None],
    ) -> None:
        """One of the two is called, unless the process dies."""
        call = _Call(process, process.life, answered)
        self.loop.after(self._delay(), self._execute, call, request)
        process.after(PATIENCE_S, call.give_up, unanswered)

    def _execute(self, call: _Call, request: Callable[[], Any]) -> None:
        if not self._gets_through(call.process):
            return
        answer = request()
        if self._gets_through(call.process):
            self.loop.after(self._delay(), call.process.run, call.life, call.answer, (answer,))

    def _gets_through(self, process: Process) -> bool:
        return self.is_up and process not in self.cut and not self.loop.chance(self.loss)

    def _delay(self) -> float:
        """Sometimes longer than the patience of those who ask."""
        return self.loop.soon(ANSWER_S) * (15 if self.loop.chance(self.slow) else 1)


class _Call:
    def __init__(self, process: Process, life: int, answered: Callable[[Any], None]):
        self.process = process
        self.life = life
        self._answered: Callable[[Any], None] | None = answered

    def answer(self, answer: Any) -> None:
        if self._answered is not None:
            answered, self._answered = self._answered, None
            answered(answer)

    def give_up(self, unanswered: Callable[[], None]) -> None:
        if self._answered is not None:
            self._answered = None
            unanswered()
