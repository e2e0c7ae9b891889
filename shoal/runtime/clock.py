"""Time, threads and locks, those of files too, as the runtime uses them: those of the machine.

A rehearsal (`shoal/rehearse/`) puts virtual ones in their place, for as long as it lasts. So what
waits for another thread, worker or server takes them from here, by their names at the moment of
use: `clock.Lock()`, `clock.sleep(…)`.
"""

from __future__ import annotations

import fcntl
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Lock = threading.Lock
Condition = threading.Condition
Event = threading.Event
Thread = threading.Thread
Queue = queue.SimpleQueue
monotonic = time.monotonic
monotonic_ns = time.monotonic_ns
process_time_ns = time.process_time_ns
sleep = time.sleep
lock_file = fcntl.flock


def check() -> None:
    """Ends a virtual thread here, where its process was killed."""


_TIME = ("monotonic", "monotonic_ns", "process_time_ns", "sleep")
_NAMES = ("Lock", "Condition", "Event", "Thread", "Queue", "lock_file", "check", *_TIME)


@contextmanager
def replaced(by: Any) -> Iterator[None]:
    """While the block runs, the attributes of `by` are what this module has under these names."""
    names = globals()
    before = {name: names[name] for name in _NAMES}
    names.update((name, getattr(by, name)) for name in _NAMES)
    try:
        yield
    finally:
        names.update(before)
