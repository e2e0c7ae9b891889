"""The launcher keeps the memory that workers share open, where lost workers may come back.

So it lasts when those that have opened it are lost before the others have come.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from shoal.runtime.run_dir import RunDir
from shoal.transport.shm.lasting_memory import keep

_POLL_S = 0.02


class KeptMemory:
    """A thread that looks for memory of workers while the block runs."""

    def __init__(self, run_dir: RunDir, is_needed: bool):
        self._run_dir = run_dir
        self._is_needed = is_needed
        self._kept: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-memory", daemon=True)

    def __enter__(self) -> KeptMemory:
        if self._is_needed:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._is_needed:
            self._thread.join()
        for descriptor in self._kept:
            os.close(descriptor)

    def _run(self) -> None:
        while not self._over.wait(_POLL_S):
            with suppress(OSError):  # of a full disk, for example: workers do without
                self._look()

    def _look(self) -> None:
        for folder in self._run_dir.memory_folders():
            descriptor = keep(folder)
            if descriptor is not None:
                self._kept.append(descriptor)
