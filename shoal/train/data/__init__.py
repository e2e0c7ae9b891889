"""Which samples each replica trains on, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class BatchPart:
    """Which part of a global batch this is.

    `total` is the number of samples in the global batch, `microbatch_sizes` that of each
    micro-batch here. Where that is 0, row 0 is a placeholder with weight 0, so that every replica
    runs the same operations. `concurrent` is above 1 where replicas take batches in turns: that
    many global batches are trained on at a time, and this replica has all rows of one of them.
    """

    total: int
    microbatch_sizes: tuple[int, ...]
    concurrent: int = 1
    counted: int | None = None  # of its samples as this worker's, where it was split again
    given: Any = None  # what the script gets instead, where that is neither a tuple nor a dict

    @property
    def content(self) -> Any:
        """The samples in their own form."""
        if isinstance(self, dict):
            return dict(self)
        return self.given if self.given is not None else tuple(self)  # type: ignore[arg-type]

    @property
    def rows(self) -> int:
        """Samples that are here, placeholders included."""
        return sum(max(1, size) for size in self.microbatch_sizes)


class Batch(tuple[Any, ...], BatchPart):
    """A replica's rows of a global batch: `(inputs, targets)`, or `(inputs, targets, weights)`."""


class DictBatch(dict[Any, Any], BatchPart):
    """A replica's rows of a global batch that is a dict."""


AnyBatch = Batch | DictBatch


def batch_of(content: Any, total: int, microbatch_sizes: Sequence[int]) -> AnyBatch:
    """A replica's rows, in the form that they have."""
    batch: AnyBatch
    if isinstance(content, Mapping):
        batch = DictBatch(content)
    elif isinstance(content, (list, tuple)) and not hasattr(content, "_fields"):
        batch = Batch(content)
    else:
        batch = Batch((content,))
        batch.given = content
    batch.total = total
    batch.microbatch_sizes = tuple(microbatch_sizes)
    return batch
