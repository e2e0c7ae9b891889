"""How replicas agree: three moments of a step."""

from __future__ import annotations

from typing import Protocol


class Sync(Protocol):
    """What happens around an engine's run.

    `every_microbatch` asks the engine to report buckets after each micro-batch, not only after
    the last one.
    """

    @property
    def every_microbatch(self) -> bool: ...
    def begin(self) -> None:
        """Weights are usable when this returns."""
        ...

    def reduce(self, bucket: slice) -> None:
        """The gradients of this slice are final here; backward may still run."""
        ...

    def finish(self) -> None:
        """The update is done when this returns; the replica is ready for the next step."""
        ...
