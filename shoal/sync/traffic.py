"""Bytes that a replica has sent, compared with those of ddp."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from shoal.comm.counting import Counting, all_reduce_bytes
from shoal.replica.flat_params import FlatParams


class StepTraffic:
    """Counts steps; the executors of the groups count bytes."""

    def __init__(self, flat: FlatParams, *counters: Counting):
        self.steps = 0
        self.recount(flat, *counters)

    def recount(self, flat: FlatParams, *counters: Counting) -> None:
        """The group has other ranks from now on."""
        self.counters = counters
        self.plain_bytes = all_reduce_bytes(flat.grads.exchanged_bytes(), counters[0].size)

    @property
    def sent(self) -> int:
        return sum(counter.sent for counter in self.counters)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count what is sent in the block, such as for a checkpoint."""
        with ExitStack() as stack:
            for counter in self.counters:
                stack.enter_context(counter.uncounted())
            yield

    def report(self) -> dict[str, Any]:
        """Bytes that this worker has sent, and what uncompressed ddp sends in a step."""
        return {
            "steps": self.steps,
            "bytes_sent": self.sent,
            "bytes_per_step": self.sent / max(1, self.steps),
            "ddp_bytes_per_step": self.plain_bytes,
        }

    def summary(self) -> list[str]:
        if not self.sent or not self.steps:
            return []
        num_bytes = self.sent / self.steps
        return [
            f"each worker sent {num_bytes:,.0f} bytes a step, where ddp sends "
            f"{self.plain_bytes:,}: {self.plain_bytes / num_bytes:.1f} times less"
        ]
