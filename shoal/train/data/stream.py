"""The batches that a replica trains on, resumed where a saved run ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from types import CodeType
from typing import Any

import torch

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.strategy.base import Batches
from shoal.train.data import AnyBatch
from shoal.train.data.batch_checks import SameBatches, check_data
from shoal.train.data.loop_place import lines_of_caller, place_of_caller
from shoal.train.data.position import LoopPosition, Positions, positions_of
from shoal.train.data.sampling import BatchOptions, BatchSplit
from shoal.train.data.sources import Feed, Recall, Source, source_of

DEFAULT_BATCH_SIZE = 256  # of job.evaluate, where job.batches was not given one before


class BatchStream:
    """Yields this replica's rows of every global batch, and counts the batches.

    `delivered` counts batches over the whole run, resumed runs included. `positions` says which of
    them each loop of the script has had; these are left out. `skip` stands for it in a worker
    that came back: so many batches of the first loops were trained on.
    """

    def __init__(
        self,
        group: Group,
        everyone: Group,
        device: torch.device,
        seed: int,
        steps_done: Callable[[], int],
        on_batch: Callable[[AnyBatch], None],
    ):
        self.seed = seed
        self.replicas = group.size
        self.same = SameBatches(everyone, group.size)
        self.steps_done = steps_done
        self.on_batch = on_batch
        self.positions = Positions()
        self.delivered = 0
        self.skip = 0
        self._counted = 0  # batches of the present epoch that a checkpoint has counted
        self.is_resumed_later = False  # a loop over batches was done before a checkpoint
        self.has_delivered = False
        self.is_passing = False  # in a turn that was finished before the checkpoint
        self.total_steps: int | None = None
        self._all_batches: int | None = None  # where these end the run, not a number of steps
        self.batch_size = DEFAULT_BATCH_SIZE
        self.max_steps: int | None = None  # of the whole job, whatever the script asks for
        self.kind = Batches.SPLIT  # which samples a replica trains on in a step
        self.must_stop: Callable[[], bool] = lambda: False  # asked between two batches
        self.before_fetch: Callable[[], None] | None = None  # called between two batches
        self.trains_in: CodeType | None = None  # the function that trains
        self._under_way: list[Source] = []  # the epochs of loops that have not ended

    def batches(self, data: Any, split: BatchSplit, options: BatchOptions) -> Iterator[Any]:
        """See `Job.batches`. Unusable data is an error before the first batch."""
        check_data(data, options, self.replicas, self.kind is Batches.WHOLE_DATASET)
        self.batch_size = options.batch_size or self.batch_size
        feed = Feed(split, self.seed, self.kind, self._skipped, self.same)
        lines = lines_of_caller(self.trains_in)
        loop = self.positions.add(place_of_caller(self.trains_in), data, lines)
        if options.batch_size is None and all(
            callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict")
        ):
            loop.data = data
        source = source_of(data, options, feed, loop)
        if source.per_epoch == 0 or options.epochs < 1:
            raise BadInput(
                "there is nothing to train on: epochs is 0, the data is empty, or drop_last leaves "
                "out all of it, which is less than a batch"
            )
        return self._loop(source, options.epochs, self._last_step(data, options))

    @property
    def is_in_loop(self) -> bool:
        """Whether the script is inside a loop over batches."""
        return bool(self._under_way)

    def restore(self, delivered: int, positions: Positions | None) -> None:
        """Go on after `delivered` batches; a worker that came back knows no positions."""
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

    def _loop(self, source: Source, epochs: int, last_step: int | None) -> Iterator[Any]:
        """Generators of loops that are left are closed: that is how `break` is seen."""
        self.is_passing = source.loop.is_over or source.loop.is_left
        self.positions.begin(source.loop)
        try:
            yield from self._epochs(source, epochs, last_step)
        finally:
            source.loop.is_left = True

    def _epochs(self, source: Source, epochs: int, last_step: int | None) -> Iterator[Any]:
        loop = source.loop
        self._expect(source, epochs, last_step)
        for batches in loop.unseen:
            source.pass_over(batches, epochs)
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
            # with a state the data itself goes on in place
            self._counted = loop.in_epoch if is_resumed and not has_state else 0
            start = self._counted + self.skip
            if last_step is not None:
                start = self._counted + min(self.skip, max(0, last_step - self.steps_passed))
            source.begin(number, start)
            self._under_way.append(source)
            try:
                yield from self._deliver(source, last_step)
            finally:
                self._under_way.remove(source)

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

    def _expect(self, source: Source, epochs: int, last_step: int | None) -> None:
        """Compute the number of steps, which progress shows."""
        self.total_steps = last_step
        self._all_batches = None
        per_epoch = source.per_epoch
        seen = source.loop.batches + self.skip
        if per_epoch is not None:
            to_come = max(0, per_epoch * epochs - seen)
            available = self.steps_done() + to_come
            self.total_steps = available if last_step is None else min(last_step, available)
            if last_step is None:
                self._all_batches = self.delivered + to_come
        if seen and per_epoch is not None and seen >= per_epoch * epochs:
            self.is_resumed_later = True

    def last_step_at(self, step: int) -> int | None:
        """The last step, at the end of this one: each takes as many batches as these have taken."""
        if self._all_batches is None or not 0 < step < self.delivered:
            return self.total_steps
        return max(step, self._all_batches * step // self.delivered)

    def _deliver(self, source: Source, last_step: int | None) -> Iterator[Any]:
        """Yield batches; none is fetched that would not be trained on."""
        while not self._is_enough(last_step):
            if self.before_fetch is not None:
                self.before_fetch()
            is_new = not source.repeats
            batch = source.next()
            if batch is None:
                return
            self.has_delivered = True
            self.is_passing = False
            self._under_way.remove(source)  # the latest one comes last
            self._under_way.append(source)
            if is_new:
                self.delivered += batch.concurrent
                source.loop.advance(batch.concurrent)
            self.on_batch(batch)
            yield batch if batch.given is None else batch.given

    # ------------------------------------------------------------------ elastic runs

    def split_again(self, replica: int, replicas: int) -> None:
        """There are other replicas: the batches that come are split over them."""
        self.replicas = replicas
        for source in self._under_way:
            source.split_for(replica, replicas, source.repeats)

    def repeat(self) -> bool:
        """The latest batch comes again, split as it is now; False if no loop gave it out."""
        if (latest := self._latest()) is not None:
            split = latest.feed.split
            latest.split_for(split.replica, split.replicas, True)
        return latest is not None

    def recall(self) -> Recall | None:
        """Makes the batch that was given out last again, split in any way."""
        latest = self._latest()
        return None if latest is None else latest.recall()

    def _latest(self) -> Source | None:
        return next((s for s in reversed(self._under_way) if s.given is not None), None)

    def _skipped(self, loop: LoopPosition, batches: int) -> None:
        """Batches were left out; positions of a checkpoint have counted them already."""
        counted = min(self._counted, batches)
        self._counted -= counted
        if self.skip and batches > counted:
            self.skip -= batches - counted
            loop.advance(batches - counted)
