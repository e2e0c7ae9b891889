"""Signals that end a block as Ctrl-C does, so that what it has made is removed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ending_by_exception() -> Iterator[None]:
    """While the block runs, SIGTERM and SIGHUP raise SystemExit. Main thread only."""

    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for ours in taken:
            signal.signal(ours, signal.SIG_IGN)  # a second one does not interrupt the removal
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    asked = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    taken = [number for number in asked if signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    except SystemExit:
        if received:  # native code that was interrupted may have given it another status
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
