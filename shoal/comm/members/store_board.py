"""How ranks of torchrun, srun or mpirun agree on the step after which all of them stop.

    any rank    asked         it got a signal
    each rank   heard/RANK    it reads last-step before every step from now on
    first rank  last-step     chosen when all have heard

A thread looks for `asked` twice a second; until then a step costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from shoal.runtime.preemption import die
from shoal.runtime.waits import Periodic

_POLL_S = 0.5
_PATIENCE_S = 10.0  # for other ranks to hear of a signal
_MAX_DIGITS = 18


class StoreBoard(Periodic):
    """`on_asked` is called when any rank got a signal. `store` must have no other users."""

    def __init__(self, store: Store, rank: int, size: int, on_asked: Callable[[], None]):
        super().__init__("shoal-preempted", _POLL_S, self._watch)
        self._store = store
        self._rank = rank
        self._size = size
        self._on_asked = on_asked
        self._announced_s: float | None = None
        self._has_heard = self._all_heard = False
        self._is_lost = False

    def announce(self) -> bool:
        self._announced_s = self._announced_s or time.monotonic()
        self.poke()
        return not self._is_lost

    def all_heard(self) -> bool:
        return self._all_heard

    def last_step(self) -> int | None:
        return self._read("last-step") if self._has_heard else None

    def write_last_step(self, steps: int) -> None:
        self._store.set("last-step", str(steps))

    def note_step(self, rank: int, steps: int) -> None:
        self._store.set(f"at/{rank}", str(steps))

    def noted_steps(self) -> dict[int, int]:
        found = {rank: self._read(f"at/{rank}") for rank in range(self._size)}
        return {rank: steps for rank, steps in found.items() if steps is not None}

    def has_exited(self, rank: int) -> bool:
        return False  # other launchers end the run with a lost worker

    def _watch(self) -> None:
        try:
            self._look()
        except RuntimeError:  # the store is gone, and its host with it
            self._is_lost = True
            if self._announced_s is not None:
                die()
        if self._all_heard or self._is_lost:
            self._is_over = True

    def _look(self) -> None:
        if self._announced_s is not None and not self._has_heard:
            self._store.set("asked", "1")
        if not self._has_heard and self._read("asked") is not None:
            self._has_heard = True  # before it says so
            self._store.set(f"heard/{self._rank}", "1")
            self._on_asked()
        if self._has_heard:
            others = range(self._size)
            self._all_heard = all(self._read(f"heard/{rank}") is not None for rank in others)
        announced_s = self._announced_s
        has_waited = announced_s is not None and time.monotonic() > announced_s + _PATIENCE_S
        if has_waited and not self._all_heard:
            die()  # a rank is lost: its launcher ends the others

    def _read(self, key: str) -> int | None:
        if not self._store.check([key]):
            return None
        text = self._store.get(key).decode(errors="replace")
        is_count = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
        return int(text) if is_count else None
