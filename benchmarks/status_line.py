"""What a long command is doing, on stderr: one line that is rewritten, or a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TERMINAL_PERIOD_S = 0.1
_LINES_PERIOD_S = 10.0  # where stderr is no terminal


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """A function to say it with, as often as one likes; the line of a terminal is wiped after."""
    line = _StatusLine(sys.stderr.isatty())
    try:
        yield line.say
    finally:
        line.close()


class _StatusLine:
    def __init__(self, is_terminal: bool):
        self._is_terminal = is_terminal
        self._said_s = -_TERMINAL_PERIOD_S if is_terminal else time.monotonic()
        self._began_s = time.monotonic()
        self._is_open = False

    def say(self, text: str) -> None:
        now_s = time.monotonic()
        period_s = _TERMINAL_PERIOD_S if self._is_terminal else _LINES_PERIOD_S
        if now_s - self._said_s < period_s:
            return
        self._said_s = now_s
        text = f"{text}, {now_s - self._began_s:.0f} s"
        print(f"\r\x1b[K{text}" if self._is_terminal else text, end="", file=sys.stderr)
        print(end="" if self._is_terminal else "\n", file=sys.stderr, flush=True)
        self._is_open = self._is_terminal

    def close(self) -> None:
        if self._is_open:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
