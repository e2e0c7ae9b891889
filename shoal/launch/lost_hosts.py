"""Which hosts of an elastic run are lost, and which of its workers may be on one that is.

A worker whose host is cut off may notice that before the launcher does, and give up. So where such
a worker is to be started again, the launcher waits until it would have noticed, too.
"""

from __future__ import annotations

import threading

from shoal.comm.guarded_store.silence import SILENT_HOST_S

_NOTICED_S = SILENT_HOST_S + 3.0


class LostHosts:
    """Used by several threads."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._changed = threading.Condition()
        self._gave_up: set[int] = set()
        self._is_over = False

    @property
    def names(self) -> frozenset[str]:
        with self._changed:
            return frozenset(self._names)

    def add(self, name: str) -> None:
        with self._changed:
            self._names.add(name)
            self._changed.notify_all()

    def note_exit(self, rank: int, returncode: int) -> None:
        """A worker that raises has lost its peers: an error of its own would end the run."""
        (self._gave_up.add if returncode > 0 else self._gave_up.discard)(rank)

    def has_host_of(self, rank: int, name: str) -> bool:
        """Whether the host `name`, on which this worker was, is lost."""
        patience_s = _NOTICED_S if rank in self._gave_up else 0.0
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or name in self._names, patience_s)
            return name in self._names

    def end(self) -> None:
        """The run is over: what waits for a host waits no longer."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
