"""The batches that a replica trains on, resumed where a saved run ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import replace
from typing import Any

import torch

from shoal.comm.group import Group
from shoal.data import AnyBatch
from shoal.data.batch_checks import SameBatches, check_data
from shoal.data.position import LoopPosition, Positions, positions_of
from shoal.data.sampling import BatchOptions, BatchSplit
from shoal.data.sources import Feed, Recall, Source, source_of
from shoal.strategy.base import Batches


class Delivery:
    """The batches of an epoch; `given` is the one that was given out last."""

    def __init__(self, source: Source, loop: LoopPosition, number: int, start: int):
        self.loop = loop
        self.given: AnyBatch | None = None
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


DEFAULT_BATCH_SIZE = 256  # of job.evaluate, where job.batches was not given one before


class BatchStream:
    """Yields this replica's rows of every global batch, and counts the batches.

    `delivered` counts batches over the whole run, resumed runs included. `positions` says which of
    them each loop of the script has had; these are left out. `skip` stands for it in checkpoints
    of earlier versions: so many batches of the first loops were trained on.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        seed: int,
        steps_done: Callable[[], int],
        on_batch: Callable[[AnyBatch], None],
    ):
        self.seed = seed
        self.replicas = group.size
        self.same = SameBatches(group, device)
        self.steps_done = steps_done
        self.on_batch = on_batch
        self.positions = Positions()
        self.delivered = 0
        self.skip = 0
        self._counted = 0  # batches of the present epoch that a checkpoint has counted
        self.is_resumed_later = False  # a loop over batches was done before a checkpoint
        self._has_delivered = False
        self.total_steps: int | None = None
        self.batch_size = DEFAULT_BATCH_SIZE
        self.max_steps: int | None = None  # of the whole job, whatever the script asks for
        self.kind = Batches.SPLIT  # which samples a replica trains on in a step
        self.must_stop: Callable[[], bool] = lambda: False  # asked between two batches
        self.before_fetch: Callable[[], None] | None = None  # called between two batches
        self._under_way: list[Delivery] = []  # the epochs of loops that have not ended

    def batches(self, data: Any, split: BatchSplit, options: BatchOptions) -> Iterator[Any]:
        """See `Job.batches`. Unusable data is an error before the first batch."""
        check_data(data, options, self.replicas, self.kind is Batches.WHOLE_DATASET)
        self.batch_size = options.batch_size or self.batch_size
        feed = Feed(split, self.seed, self.kind, self._skipped, self.same.check)
        source = source_of(data, options, feed)
        loop = self.positions.add()
        if options.batch_size is None and all(
            callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict")
        ):
            loop.data = data
        return self._loop(loop, source, options.epochs, self._last_step(data, options))

    def restore(self, delivered: int, positions: Positions | None) -> None:
        """Go on after `delivered` batches; an old checkpoint knows no positions."""
        self.delivered = delivered
        self.positions = positions or Positions()
        self.skip = 0 if positions else delivered

    def resume(self, delivered: int, position: Any, steps: int) -> None:
        """As after the checkpoint of `steps` that the others have loaded and gone on from."""
        trained = self.steps_done() - steps
        positions = positions_of(position) if position else None
        self.restore(delivered, positions)
        self.delivered += trained
        self.skip += trained

    def _loop(
        self, loop: LoopPosition, source: Source, epochs: int, last_step: int | None
    ) -> Iterator[Any]:
        """Generators of loops that are left are closed: that is how `break` is seen."""
        self.positions.begin(loop)
        try:
            yield from self._epochs(loop, source, epochs, last_step)
        finally:
            loop.is_left = True

    def _epochs(
        self, loop: LoopPosition, source: Source, epochs: int, last_step: int | None
    ) -> Iterator[Any]:
        self._expect(loop, source.per_epoch, epochs, last_step)
        if loop.is_over:
            self.is_resumed_later = True
            source.pass_over(loop.batches, epochs)
            return
        has_state = loop.data is not None and loop.state is not None
        if has_state:
            loop.data.load_state_dict(loop.state)
        else:
            source.pass_over(loop.batches - loop.in_epoch, loop.epochs - 1)
        for i in range(max(0, loop.epochs - 1), epochs):
            if self._is_enough(last_step):
                return
            is_resumed = i < loop.epochs
            number = loop.epoch if is_resumed else self.positions.begin_epoch(loop)
            self._counted = loop.in_epoch if is_resumed else 0
            if is_resumed and has_state:
                self._counted = 0  # the data itself goes on in place
            start = self._counted + self.skip
            if last_step is not None:
                start = self._counted + min(self.skip, max(0, last_step - self.steps_passed))
            delivery = Delivery(source, loop, number, start)
            self._under_way.append(delivery)
            try:
                yield from self._deliver(delivery, last_step)
            finally:
                self._under_way.remove(delivery)

    def _is_enough(self, last_step: int | None) -> bool:
        return (last_step is not None and self.steps_passed >= last_step) or self.must_stop()

    @property
    def steps_passed(self) -> int:
        """The steps of the job as far as its loops have come: less while batches are left out."""
        return self.steps_done() - self.skip

    def _last_step(self, data: Any, options: BatchOptions) -> int | None:
        """The step to stop after: the script's `steps` or `max_steps`, whichever is less.

        A step on the whole dataset counts as all the batches in it.
        """
        if self.max_steps is None:
            return options.steps
        limit = self.max_steps
        if self.kind is Batches.WHOLE_DATASET and options.batch_size and isinstance(data, Sized):
            limit = max(1, round(limit * options.batch_size / max(1, len(data))))
        return limit if options.steps is None else min(options.steps, limit)

    def _expect(
        self, loop: LoopPosition, per_epoch: int | None, epochs: int, last_step: int | None
    ) -> None:
        """Compute the number of steps, which progress shows."""
        self.total_steps = last_step
        seen = loop.batches + self.skip
        if per_epoch is not None:
            available = self.steps_done() + max(0, per_epoch * epochs - seen)
            self.total_steps = available if last_step is None else min(last_step, available)
        if seen and per_epoch is not None and seen >= per_epoch * epochs:
            self.is_resumed_later = True

    @property
    def has_nothing_left(self) -> bool:
        """Whether all batches that the script asked for were trained on before a checkpoint."""
        return self.is_resumed_later and not self._has_delivered

    def _deliver(self, delivery: Delivery, last_step: int | None) -> Iterator[Any]:
        """Yield batches; none is fetched that would not be trained on."""
        while not self._is_enough(last_step):
            if self.before_fetch is not None:
                self.before_fetch()
            is_new = not delivery.repeats
            batch = delivery.next()
            if batch is None:
                return
            self._has_delivered = True
            self._under_way.remove(delivery)  # the latest one comes last
            self._under_way.append(delivery)
            if is_new:
                self.delivered += batch.concurrent
                delivery.loop.advance(batch.concurrent)
            self.on_batch(batch)
            yield batch if batch.given is None else batch.given

    # ------------------------------------------------------------------ elastic runs

    def split_again(self, replica: int, replicas: int) -> None:
        """There are other replicas: the batches that come are split over them."""
        self.replicas = replicas
        for delivery in self._under_way:
            delivery.split_again(replica, replicas)

    def repeat(self) -> bool:
        """The latest batch comes again, split as it is now; False if no loop gave it out."""
        latest = self._latest_delivery()
        return latest is not None and latest.repeat()

    def recall(self) -> Recall | None:
        """Makes the batch that was given out last again, split in any way."""
        latest = self._latest_delivery()
        return None if latest is None else latest.recall()

    def _latest_delivery(self) -> Delivery | None:
        return next((d for d in reversed(self._under_way) if d.given is not None), None)

    def _skipped(self, loop: LoopPosition, batches: int) -> None:
        """Batches were left out; positions of a checkpoint have counted them already."""
        counted = min(self._counted, batches)
        self._counted -= counted
        if self.skip and batches > counted:
            self.skip -= batches - counted
            loop.advance(batches - counted)
