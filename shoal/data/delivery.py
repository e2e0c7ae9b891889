"""One epoch of a loop over batches, which may be split in another way while it is under way."""

from __future__ import annotations

import itertools
from dataclasses import replace

from shoal.data.batch import AnyBatch
from shoal.data.position import LoopPosition
from shoal.data.sources import Recall, Source

_turns = itertools.count()


class Delivery:
    """`given` is the batch that was given out last, and `turn` grows with each of all loops."""

    def __init__(self, source: Source, loop: LoopPosition, number: int, start: int):
        self.loop = loop
        self.given: AnyBatch | None = None
        self.turn = 0
        self.repeats = False  # the next batch is the one that was given out last
        self._source = source
        self._at = start
        self._rows = iter(source.epoch(loop, number, start))

    def next(self) -> AnyBatch | None:
        """The next batch, or None at the end of the epoch."""
        batch = next(self._rows, None)
        if batch is not None:
            self.given = batch
            self._at = self.loop.in_epoch - self.repeats
            self.turn = next(_turns)
        self.repeats = False
        return batch

    def recall(self) -> Recall:
        """Makes the batch that was given out last again, also when the epoch is over."""
        return self._source.recall(self._at)

    def split_again(self, replica: int, replicas: int) -> None:
        """Split the batches that come over other replicas."""
        self._go_on(replica, replicas, self.repeats)

    def repeat(self) -> bool:
        """Give out the latest batch again; False if there is none."""
        if self.given is not None:
            split = self._source.feed.split
            self._go_on(split.replica, split.replicas, True)
        return self.given is not None

    def _go_on(self, replica: int, replicas: int, repeats: bool) -> None:
        split = replace(self._source.feed.split, replica=replica, replicas=replicas)
        at = self.loop.in_epoch - repeats
        self._rows = self._source.again(split, at, repeats)
        self.repeats = repeats
