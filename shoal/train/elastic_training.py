"""Training that goes on when workers leave and join, without a restart of the others.

    step 41    worker 2 is killed; workers 0, 1 and 3 lose it in an all-reduce
    regroup    they form the next generation (`comm/membership.py`) and compare their steps: one of
               them may have ended step 41. It sends its state to those that have not
    step 41    where none has ended it, its global batch is split over 3 workers and done again
    step 60    worker 2, started again, is admitted: it gets the state and goes on with step 60

A step is interrupted before its update, which comes last: weights and optimizer are those of the
step before, and only gradients and buffers have to be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shoal.comm.elastic_group import ElasticGroup
from shoal.comm.objects import broadcast_object
from shoal.data.batch import AnyBatch, BatchPart
from shoal.data.stream import BatchStream
from shoal.errors import BadInput, PeerLost, RunOver
from shoal.pytree import tensors_of
from shoal.train.sharded_state import Interrupted, ShardedState, UnshardedState
from shoal.train.step import Step

T = TypeVar("T")


class TrainingState(UnshardedState, Protocol):
    """The state of a job, which one worker sends to others."""

    def pack(self) -> dict[str, Any]:
        """All of it."""
        ...

    def unpack(self, state: dict[str, Any], is_new: bool) -> None:
        """Take that of another worker; `is_new`: this worker has not trained before."""
        ...


class ElasticTraining:
    """What a job of an elastic run does around its steps."""

    def __init__(
        self,
        group: ElasticGroup,
        stream: BatchStream,
        steps: Sequence[Step],
        state: TrainingState,
        after_regroup: Callable[[], None],
    ):
        """`steps` are those of the job, also those that are added later.

        `after_regroup` is called when there are other replicas than before.
        """
        self.group = group
        self._stream = stream
        self._steps = steps
        self._state = state
        self._after_regroup = after_regroup
        self._shards = ShardedState(group, steps, state)
        self._is_new = True
        self._returned: list[dict[str, Any]] = []  # by the latest steps of the worker that sent
        self._split_again: tuple[list[Tensor], AnyBatch] | None = None
        stream.before_fetch = self._between_batches

    # ------------------------------------------------------------------ one step

    def train(self, step: Step, batch: Any) -> Any:
        """What `step` returns, however often it has to be done again."""
        self.join()
        batch = self._present(batch)
        while True:
            buffers = [buffer.clone() for buffer in step.model.buffers()]
            try:
                return step.attempt(batch)
            except PeerLost as error:
                if error.after_s is not None:
                    raise
                lost = error
            steps = step.steps
            if self._is_sharded:
                self._shards.interrupted = Interrupted(step, buffers)
            else:
                step.abandon(buffers)
            self._regroup(admits=len({other.steps for other in self._steps}) == 1)
            if step.steps > steps:  # others had ended it, and their state is here now
                if self._is_sharded:
                    return step.result()
                return step.adopt(self._returned[self._steps.index(step)])
            again = self._again(step, batch, lost)
            if again is None:
                return step.result()
            batch = again

    def _present(self, batch: Any) -> Any:
        """The batch as it is split now: a step before, on the same batch, was done again."""
        if self._split_again is not None and _has(batch, self._split_again[0]):
            return self._split_again[1]
        return batch

    def _again(self, step: Step, batch: Any, lost: PeerLost) -> AnyBatch | None:
        """The batch of an interrupted step, split over the workers that there are now.

        None where the script made another one of it: it gets the batch of job.batches again.
        """
        given = step.latest
        is_given = given is not None and _has(batch, tensors_of(given.content))
        if not self._stream.repeat():
            raise BadInput(
                "an elastic run takes its batches from job.batches, inside of whose loop step is "
                "called: it has to split the batch again that a lost worker has not finished"
            ) from lost
        if is_given:
            originals = tensors_of(given.content) if given is not None else []
            if self._split_again is not None:
                originals = self._split_again[0]
            repeated = self._stream.take_repeated()
            assert repeated is not None
            self._split_again = (originals, repeated)
            return repeated
        if len(self._steps) > 1:
            raise BadInput(
                "an elastic run that trains several models has to pass the batches of job.batches "
                "to them as they are: change samples in the dataset or in collate"
            ) from lost
        return None

    # ------------------------------------------------------------------ the group

    def join(self) -> None:
        """Be in the group, with the present state."""
        if not self.group.has_formed:
            self._regroup(admits=True)

    def hold(self, act: Callable[[], T]) -> T:
        """Do what all workers do together, or get what it returned to the others."""
        self.join()
        membership = self.group.membership
        return membership.hold(self._stream.steps_passed, act, lambda: self._regroup(admits=False))

    def close(self) -> None:
        """This worker takes part in nothing more."""
        if self.group.has_formed:
            self.group.membership.leave()

    def _between_batches(self) -> None:
        self._split_again = None
        if self.group.rank == 0 and self.group.membership.has_newcomers():
            self._regroup(admits=True)

    def _regroup(self, admits: bool) -> None:
        while True:
            try:
                self.group.regroup(admits)
                if self._is_sharded:
                    self._shards.share()
                else:
                    self._share_state()
                break
            except PeerLost as lost:
                if lost.after_s is not None:
                    raise
        self.group.membership.begin()
        for step in self._steps:
            step.regroup()
        self._stream.split_again(self.group.rank, self.group.size)
        self._after_regroup()

    @property
    def _is_sharded(self) -> bool:
        return any(step.sync.movable is not None for step in self._steps)

    def _share_state(self) -> None:
        """Those who are behind get the state of the first of those who have done most steps."""
        steps = sum(step.steps for step in self._steps)
        progress = torch.tensor([-1 if self._is_new else steps])
        rows = progress.new_empty(self.group.size)
        self.group.all_gather(rows, progress).wait()
        most = int(rows.max())
        if most < 0 and self.group.membership.has_begun:
            raise RunOver(self.group.membership.me.worker)
        if most < 0 or int(rows.min()) < most:
            self._send(int(rows.argmax()), is_behind=int(progress) < most or most < 0)
        self._is_new = False

    def _send(self, source: int, is_behind: bool) -> None:
        is_source = self.group.rank == source
        mine: dict[str, Any] = {}
        if is_source:
            returned = [step.numbers() for step in self._steps]
            mine = {"job": self._state.pack(), "returned": returned}
        received = broadcast_object(self.group, mine, source)
        if is_behind and not is_source:
            self._returned = received["returned"]
            self._state.unpack(received["job"], self._is_new)
            self._is_new = False


def _has(batch: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether it is made of these very tensors."""
    content = batch.content if isinstance(batch, BatchPart) else batch
    own = tensors_of(content)
    return len(own) == len(tensors) and all(a is b for a, b in zip(own, tensors, strict=True))
