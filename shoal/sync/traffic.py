"""How much a replica has sent, beside what ddp would have sent."""

from __future__ import annotations

from typing import Any

from shoal.group.counting import CountingGroup, all_reduce_bytes
from shoal.replica.flat import FlatParams


class Traffic:
    """Counts steps; the group counts bytes."""

    def __init__(self, flat: FlatParams, group: CountingGroup):
        self.group, self.steps = group, 0
        alone = flat.head.nbytes if flat.head_travels_alone else 0
        self.plain_bytes = all_reduce_bytes(flat.data.nbytes + alone, group.size)

    def report(self) -> dict[str, Any]:
        """Bytes that this worker has sent, and what uncompressed ddp sends in a step."""
        return {
            "steps": self.steps,
            "bytes_sent": self.group.sent,
            "bytes_per_step": self.group.sent / max(1, self.steps),
            "ddp_bytes_per_step": self.plain_bytes,
        }

    def summary(self) -> list[str]:
        if not self.group.sent or not self.steps:
            return []
        each = self.group.sent / self.steps
        return [
            f"each worker sent {each:,.0f} bytes a step, where ddp sends {self.plain_bytes:,}: "
            f"{self.plain_bytes / each:.1f} times less"
        ]
