"""Exponential backoff, for polling files and memory of other processes."""

from __future__ import annotations

import time


class Backoff:
    """Each call sleeps twice as long as the one before, up to a limit."""

    def __init__(self, first_s: float, longest_s: float):
        self._next_s = first_s
        self._longest_s = longest_s

    def __call__(self) -> None:
        time.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, self._longest_s)
