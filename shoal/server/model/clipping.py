"""Gradient clipping by a norm over all servers, and over all shards of a model.

one model        the leader collects the norms of all servers and computes the factor
shard of a model a worker takes these norms (NORMS), computes the norm over all shards with
                 the other workers of its replica, and sends it (TOTAL_NORM)
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from shoal.server.model.membership import Membership
from shoal.server.model.shard import DTYPES, clip_factor
from shoal.server.protocol.frames import Refused
from shoal.server.protocol.messages import ModelSpec


class Clipping:
    """The clip factor of a step; the leader asks for it under the model's lock."""

    def __init__(self, lock: threading.Condition, membership: Membership, spec: ModelSpec):
        self._lock = lock
        self._membership = membership
        self._spec = spec
        self._norms: Sequence[float] | None = None  # while the total norm is awaited
        self._total: float | None = None

    def factor(self, norms: Sequence[float], bound: float) -> float:
        """What to multiply gradients by, from the norms of all servers."""
        if self._spec.norm_from_workers:
            norms = [self._await_total(norms)]
        return clip_factor(norms, bound, DTYPES[self._spec.dtype])

    def norms(self, worker: int) -> Sequence[float]:
        """The norm of every parameter slice of all servers, once the step is summed."""
        if not self._spec.norm_from_workers or self._spec.clip_norm is None:
            raise Refused("the servers of this model do not clip by a norm of the workers")
        with self._lock:
            self._membership.wait(worker, lambda: self._norms is not None)
            assert self._norms is not None
            return self._norms

    @property
    def awaits_total(self) -> bool:
        return self._norms is not None and self._total is None

    def set_total(self, value: float) -> None:
        """The norm over all shards has arrived."""
        with self._lock:
            if self._norms is None or self._total is not None:
                raise Refused("TOTAL_NORM arrives, but no step waits for it")
            self._total = value
            self._lock.notify_all()

    def _await_total(self, norms: Sequence[float]) -> float:
        self._norms = norms
        self._lock.notify_all()
        self._lock.wait_for(lambda: self._membership.failure is not None or self._total is not None)
        self._membership.check()
        total = self._total
        assert total is not None
        self._norms = None
        self._total = None
        return total
