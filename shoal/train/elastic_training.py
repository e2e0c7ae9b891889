"""Training that goes on when workers leave and join, without a restart of the others.

    step 41    worker 2 is killed; workers 0, 1 and 3 lose it in an all-reduce
    regroup    they form the next generation (`comm/members`) and compare their steps: one of
               them may have ended step 41. It sends its state to those that have not
    step 41    where none has ended it, its global batch is split over 3 workers and done again
    step 60    worker 2, started again, is admitted: it gets the state and goes on with step 60

Under ddp the update comes last, so that a step which was interrupted has changed no weights. Where
replicas update first and average later (localsgd, gossip), they return to where all had agreed
(`RollbackPoint`), and do all steps since then again, on the same samples, split in the new way.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from shoal.comm.members.elastic_group import ElasticGroup
from shoal.comm.objects import all_gather_object, broadcast_object
from shoal.errors import BadInput, PeerLost, RunOver
from shoal.runtime.pytree import tensors_of
from shoal.sync.movable_shards import MovableShards, ShardProgress, settled
from shoal.train.data import AnyBatch, BatchPart
from shoal.train.data.sources import Recall
from shoal.train.job_state import JobState
from shoal.train.step.prepare_model import check_same_model
from shoal.train.step.step import Step

OptimizerValues = dict[Tensor, dict[str, Any]]  # by parameter


class RollbackPoint:
    """A copy of the state of a step, taken when all replicas have agreed.

        localsgd(every=4)     step 8: average      9   10   11      worker 2 is lost
                              the others return to step 8 and do 9, 10 and 11 again, without it

    What worker 2 has learned in steps 9 to 11 is lost with its weights. Where weights are updated
    after all communication (ddp) there is nothing to undo but gradients and buffers.
    """

    def __init__(self, step: Step):
        self.steps = step.steps
        self.step = step
        self._buffers: list[Tensor] = []
        self._weights: Tensor | None = None
        self._optimizer: OptimizerValues = {}
        self._settings: list[dict[str, Any]] = []
        self._updates = 0

    def take(self) -> None:
        """Return to the present state, from now on."""
        step = self.step
        self.steps = step.steps
        self._buffers = [buffer.clone() for buffer in step.model.buffers()]
        if not step.sync.undo_steps:
            return
        optimizer = step.update.optimizer
        self._weights = None  # before there is another copy
        self._optimizer = {}
        self._weights = step.flat.data.clone()
        self._optimizer = _copied(optimizer.state)
        self._settings = [copy.copy(group) for group in optimizer.param_groups]
        self._updates = step.update.steps

    def restore(self) -> None:
        """Undo what was done since `take`."""
        step = self.step
        step.abandon(self._buffers)
        if self._weights is None:
            return
        with torch.no_grad():
            step.flat.data.copy_(self._weights)
        optimizer = step.update.optimizer
        optimizer.state.clear()
        optimizer.state.update(_copied(self._optimizer))
        for group, settings in zip(optimizer.param_groups, self._settings, strict=True):
            group.update(settings)
        step.update.steps = self._updates
        step.steps = self.steps
        step.sync.undo()


def _copied(values: Any) -> OptimizerValues:
    return {
        p: {
            key: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for key, value in state.items()
        }
        for p, state in values.items()
    }


class ShardedState:
    """What a worker does about its state where each of them holds shards of it.

        compare    which steps are done, and for which group the shards are that each worker holds
        settle     end the update, or the change of shards, that others have ended; else undo it
        stage      get the shards of the present group; newcomers also get what is not sharded
        barrier    all have staged
        swap       hold these shards alone

    A worker may be lost at any of these moments: then they begin again, with the next generation.
    """

    def __init__(self, group: ElasticGroup, state: JobState):
        self._group = group
        self._steps = state.models
        self._state = state
        self._unsharded: dict[str, Any] | None = None  # staged in a newcomer
        self.interrupted: RollbackPoint | None = None  # of a step that a loss has interrupted
        self.is_new = True
        self.has_ended_step = False  # which the script has not returned from

    @property
    def is_open(self) -> bool:
        """Whether the script may be inside of a step whose update is done.

        What it does after that, such as to update an average, a newcomer would not get.
        """
        is_updating = any(shards.is_prepared for shards in self._shards)
        is_updated = any(step.update.steps > step.steps for step in self._steps)
        return self.has_ended_step or is_updating or is_updated

    def share(self) -> None:
        """All workers call it; PeerLost where it has to begin again."""
        rows = self._compare()
        self._settle(rows)
        rows = [settled(row) for row in rows]
        self._stage(rows)
        self._group.barrier().wait()
        for shards in self._shards:
            shards.swap()
        if self.is_new:
            self._take_unsharded()

    def _compare(self) -> list[list[ShardProgress]]:
        """For each model how far each rank is."""
        is_open = self.is_open
        mine = [s.progress(self.is_new)._replace(is_open=is_open) for s in self._shards]
        by_rank = all_gather_object(self._group, [tuple(progress) for progress in mine])
        rows = [[ShardProgress(*row) for row in ranks] for ranks in zip(*by_rank, strict=True)]
        if all(progress.is_new for progress in rows[0]):
            if self._group.membership.has_begun:
                raise RunOver(self._group.membership.me.worker)
            for row in rows:  # all start from what the first one has
                row[0] = row[0]._replace(is_new=False)
        return rows

    def _settle(self, rows: Sequence[Sequence[ShardProgress]]) -> None:
        rank = self._group.rank
        for shards, row in zip(self._shards, rows, strict=True):
            shards.settle(row, rank)
        if self.is_new and not settled(rows[0])[rank].is_new and rows[0][rank].is_new:
            self._take_unsharded()
        for step in self._steps:
            if not self.is_new and step.update.steps > step.steps:
                step.end_interrupted()
                self.has_ended_step = True
            elif self.interrupted is not None and self.interrupted.step is step:
                self.interrupted.restore()
        self.interrupted = None

    def _stage(self, rows: Sequence[Sequence[ShardProgress]]) -> None:
        group = self._group
        newcomers = [progress.is_new for progress in rows[0]]
        if any(newcomers):
            # from one that is between two steps, as long as there is one: it may be lost after
            # newcomers were admitted
            trained = [rank for rank, row in enumerate(rows[0]) if not row.is_new]
            source = next((rank for rank in trained if not rows[0][rank].is_open), trained[0])
            mine = self._state.pack_unsharded() if group.rank == source else {}
            received = broadcast_object(group, mine, source)
            self._unsharded = received if newcomers[group.rank] else None
        for shards, row in zip(self._shards, rows, strict=True):
            shards.stage(row, group, group.membership.generation.number)

    def _take_unsharded(self) -> None:
        self.is_new = False
        if self._unsharded is not None:  # else this is the worker that the others start from
            self._state.unpack_unsharded(self._unsharded)
            self._unsharded = None

    @property
    def _shards(self) -> list[MovableShards]:
        return [step.sync.movable for step in self._steps if step.sync.movable is not None]


T = TypeVar("T")


@dataclass(eq=False)
class Attempt:
    """A call of a step that replicas have not agreed after: it may have to be done again."""

    step: Step
    number: int  # `step.steps` after it
    recall: Recall | None  # makes its batch again; None: the script has made another one of it
    batch: AnyBatch | None  # of job.batches, on which several models may train
    is_reported: bool = False  # the script has got its loss


class ElasticTraining:
    """What a job of an elastic run does around its steps."""

    def __init__(self, group: ElasticGroup, state: JobState, after_regroup: Callable[[], None]):
        """`after_regroup` is called when there are other replicas than before."""
        self.group = group
        self._stream = state.stream
        self._steps = state.models
        self._state = state
        self._after_regroup = after_regroup
        self._shards = ShardedState(group, state)
        self._is_new = True
        self._fetched_in = 0  # the generation over which the latest batch was split
        self._undone: list[Attempt] = []  # what was done since replicas agreed, in its order
        self._points: dict[int, RollbackPoint] = {}  # by the number of the step in `steps`
        self._stream.before_fetch = self._between_batches

    # ------------------------------------------------------------------ one step

    def train(self, step: Step, batch: Any) -> Any:
        """What `step` returns, however often it has to be done again."""
        self.join()
        recall = self._recall(step, batch)
        attempt = Attempt(step, step.steps + 1, recall, step.latest)
        self._undone.append(attempt)
        try:
            if self._fetched_in == self.group.membership.generation.number:
                self._do(attempt, batch)
            else:
                self._do_again(attempt)
        except PeerLost as lost:
            if lost.after_s is not None:
                raise
            self._recover(admits=len({self._agreed_steps(s) for s in self._steps}) == 1)
        self._shards.has_ended_step = False
        return step.result()

    def _recall(self, step: Step, batch: Any) -> Recall | None:
        given = [] if step.latest is None else tensors_of(step.latest.content)
        own = tensors_of(batch.content if isinstance(batch, BatchPart) else batch)
        if given and len(own) == len(given) and all(map(operator.is_, own, given)):
            return self._stream.recall()  # it is made of these very tensors
        if step.sync.undo_steps > 1:
            raise BadInput(
                f"{step.term} does steps again when a worker is lost, so it has to get the batches "
                "of job.batches as they are: change samples in the dataset or in collate"
            )
        return None

    def _count_again(self, batch: AnyBatch | None, number: int) -> None:
        """So many samples of a batch are this worker's; it was counted when it was given out."""
        if batch is not None:
            before = sum(batch.microbatch_sizes) if batch.counted is None else batch.counted
            self._state.throughput.recount_samples(before, number)
            batch.counted = number

    def _do(self, attempt: Attempt, batch: Any) -> None:
        step = attempt.step
        if step.sync.is_agreed:
            self._point_of(step).take()
        if step.sync.undo_steps > 1:  # there are steps in which no message could fail
            self.group.membership.check()
        self._shards.interrupted = self._point_of(step)
        step.attempt(batch, reports=not attempt.is_reported)
        self._shards.interrupted = None
        attempt.is_reported = True
        if step.sync.is_agreed:
            self._undone = [other for other in self._undone if other.step is not step]

    def _do_again(self, attempt: Attempt) -> None:
        """Its batch is split over the workers that there are now.

        If the script made another one of it, it gets the batch of job.batches again.
        """
        if attempt.recall is not None:
            batch = attempt.recall(self.group.rank, self.group.size)
            self._count_again(attempt.batch, sum(batch.microbatch_sizes))
            self._do(attempt, batch)
            return
        self._undone.remove(attempt)
        self._count_again(attempt.batch, 0)  # it is counted when it is given out again
        if not self._stream.repeat():
            raise BadInput(
                "an elastic run takes its batches from job.batches, inside of whose loop step is "
                "called: it has to split the batch again that a lost worker has not finished"
            )
        if len(self._steps) > 1:
            raise BadInput(
                "an elastic run that trains several models has to pass the batches of job.batches "
                "to them as they are: change samples in the dataset or in collate"
            )

    def _recover(self, admits: bool) -> None:
        """Form the next group, and do again what was undone."""
        while True:
            self._regroup(admits)
            try:
                for attempt in list(self._undone):
                    self._do_again(attempt)
                return
            except PeerLost as lost:
                if lost.after_s is not None:
                    raise

    # ------------------------------------------------------------------ the group

    def join(self) -> None:
        """Be in the group, with the present state."""
        if not self.group.has_formed:
            self._regroup(admits=True)

    def hold(self, act: Callable[[], T]) -> T:
        """Do what all workers do together, or get what it returned to the others."""
        self.join()
        membership = self.group.membership
        steps = self._stream.steps_passed
        return membership.hold(steps, act, lambda: self._recover(admits=False))

    def close(self) -> None:
        """This worker takes part in nothing more."""
        if self.group.has_formed:
            self.group.membership.leave()

    def _between_batches(self) -> None:
        membership = self.group.membership
        if self.group.rank == 0 and not self._undone and membership.has_newcomers():
            self._regroup(admits=True)
        self._fetched_in = membership.generation.number

    def _regroup(self, admits: bool) -> None:
        while True:
            try:
                self.group.regroup(admits, not (self._is_sharded and self._shards.is_open))
                for step in () if self.group.membership.has_begun else self._steps:
                    check_same_model(step.model, self.group, torch.device("cpu"))
                if self._is_sharded:
                    self._shards.share()
                    self._undone = [a for a in self._undone if a.number > a.step.steps]
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
        """Return to what replicas have agreed on.

        Those who are behind get the state of the first of those who have done most steps.
        """
        steps = [self._agreed_steps(step) for step in self._steps]
        mine = torch.tensor([-1] * (1 + len(steps)) if self._is_new else [sum(steps), *steps])
        rows = mine.new_empty(self.group.size, len(mine))
        self.group.all_gather(rows, mine).wait()
        most = rows.max(0).values
        if most[0] < 0 and self.group.membership.has_begun:
            raise RunOver(self.group.membership.me.worker)
        for i, step in enumerate(self._steps):
            if self._is_undone(step):
                mine[1 + i] = self._settle(step, int(most[1 + i]))
        if most[0] < 0 or bool((rows[:, 0] < most[0]).any()):
            is_behind = bool((mine[1:] < most[1:]).any()) or self._is_new
            self._send(int(rows[:, 0].argmax()), is_behind)
        self._is_new = False

    def _agreed_steps(self, step: Step) -> int:
        return self._point_of(step).steps if self._is_undone(step) else step.steps

    def _settle(self, step: Step, most: int) -> int:
        """Keep a step that others have committed, or undo all since replicas agreed.

        Returns the steps that count.
        """
        if step.sync.is_committing and most > self._point_of(step).steps:
            step.keep(reports=not all(a.is_reported for a in self._undone if a.step is step))
            self._undone = [attempt for attempt in self._undone if attempt.step is not step]
        else:
            self._point_of(step).restore()
        return step.steps

    def _send(self, source: int, is_behind: bool) -> None:
        is_source = self.group.rank == source
        mine: dict[str, Any] = {}
        if is_source:
            returned = [step.numbers() for step in self._steps]
            mine = {"job": self._state.pack(), "returned": returned}
        received = broadcast_object(self.group, mine, source)
        if is_behind and not is_source:
            self._state.unpack(received["job"], self._is_new)
            self._is_new = False
            # others have done these steps, and their state is here now
            done = [a for a in self._undone if a.number <= a.step.steps]
            self._undone = [a for a in self._undone if a.number > a.step.steps]
            for attempt in done:
                if not attempt.is_reported:
                    attempt.step.adopt(received["returned"][self._steps.index(attempt.step)])

    def _is_undone(self, step: Step) -> bool:
        return any(attempt.step is step for attempt in self._undone)

    def _point_of(self, step: Step) -> RollbackPoint:
        return self._points.setdefault(self._steps.index(step), RollbackPoint(step))
