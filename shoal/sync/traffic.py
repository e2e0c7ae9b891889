"""Bytes that a replica has sent, compared with those of ddp."""

from __future__ import annotations

from typing import Any

from shoal.comm.counting import SentBytes, all_reduce_bytes
from shoal.comm.group import Group
from shoal.replica.flat.params import FlatParams


class StepTraffic(SentBytes):
    """Counts steps, and the bytes that groups send."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self.plain_bytes = 0

    def count(self, flat: FlatParams, group: Group) -> Group:
        """`group` of replicas as it is now, whose calls are counted."""
        self.plain_bytes = all_reduce_bytes(flat.grads.exchanged_bytes(), group.size)
        return group.counted(self)

    def report(self) -> dict[str, Any]:
        """Bytes that this worker has sent, and what uncompressed ddp sends in a step."""
        return {
            "steps": self.steps,
            "bytes_sent": self.total,
            "bytes_per_step": self.total / max(1, self.steps),
            "ddp_bytes_per_step": self.plain_bytes,
        }

    def summary(self) -> list[str]:
        if not self.total or not self.steps:
            return []
        num_bytes = self.total / self.steps
        return [
            f"each worker sent {num_bytes:,.0f} bytes a step, where ddp sends "
            f"{self.plain_bytes:,}: {self.plain_bytes / num_bytes:.1f} times less"
        ]
