"""A server that is slow on purpose: `--slow server:1:4x`.

    begin()     a thread begins a piece of work: it has got a frame
    pay()       wait so long that the work since then has taken `factor` times as long

Work is what a thread computes, or waits for a core; waiting for others costs nothing. It is paid
before the answer leaves, so that others see it.
"""

from __future__ import annotations

import threading
from time import sleep

from shoal.runtime.faults import busy_s


class Slowness:
    """How much slower this server is; each thread pays for its own work."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._of_thread = threading.local()

    @property
    def is_slow(self) -> bool:
        return self.factor > 1

    def begin(self) -> None:
        if self.is_slow:
            self._of_thread.paid_s = busy_s()

    def pay(self) -> None:
        """What was paid before is not paid twice."""
        if not self.is_slow:
            return
        now_s = busy_s()
        paid_s = getattr(self._of_thread, "paid_s", now_s)
        sleep((self.factor - 1) * max(0.0, now_s - paid_s))
        self._of_thread.paid_s = busy_s()
