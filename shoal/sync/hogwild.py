"""Hogwild: one copy of the weights in shared memory, which every worker updates without locks.

    worker 0   reads the weights ── gradient of its batch ── writes ── reads …
    worker 1        reads ── gradient of its batch ── writes ── reads …
                                 the same memory

No worker waits, so a gradient may belong to weights that others have changed since: by about one
update of each other worker. Two that write the same number at once may lose one of the two
changes. Where gradients are sparse only the rows that they name are written, and workers seldom
meet.

Workers take whole batches in turns (`data.in_turns`), so every update is one that a single worker
would make, on weights that are a little older. What Adagrad adds up is shared like the weights.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.comm.transport.shm.rank_memory import FREE_MARK, header_bytes
from shoal.errors import BadInput
from shoal.strategy.sync_terms import Hogwild
from shoal.sync import Comeback, Replica, Sync, SyncPlan, runs
from shoal.sync.ddp import LocalSync
from shoal.sync.lasting import InRankMemory, aligned_bytes, views_in

_STEPS = FREE_MARK
_MISSED = FREE_MARK + 1


class HogwildSync(InRankMemory):
    """A step exchanges nothing: it computes on the shared weights and changes them.

    The weights that count are the shared ones, when all workers have come as far as this one.
    While one worker saves, others may already train on. The state of optimizers other than
    Adagrad is each worker's own, and rank 0's is saved. `statistics` (BatchNorm's running ones)
    are shared like the weights.
    """

    def __init__(self, replica: Replica, momentum: bool):
        statistics = replica.statistics
        self._settings = Settings(replica.update.optimizer, momentum, replica.say)
        optimizer = replica.update.optimizer
        is_adagrad = isinstance(optimizer, torch.optim.Adagrad)  # what it adds up is shared, too
        sums = [optimizer.state[p]["sum"] for p in replica.flat.params if is_adagrad]
        tensors = [replica.flat.data, *statistics, *sums]
        offset = header_bytes(replica.group.size)

        def views_of(memory: mmap.mmap) -> list[Tensor]:
            return views_in(torch.frombuffer(memory, dtype=torch.uint8, offset=offset), tensors)

        def fill(memory: mmap.mmap) -> None:
            torch._foreach_copy_(views_of(memory), tensors)

        super().__init__(replica, aligned_bytes(t.nbytes for t in tensors), fill)
        views = views_of(self.ranks.memory)
        self.flat.move_to(views[0])
        for tensor, view in zip(statistics, views[1:], strict=False):
            tensor.data = view
        self._shared_sums = views[1 + len(statistics) :]
        self._put_sums()
        self.steps = self.behind = self.most_behind = 0
        self._others = 0
        self.flat.grads.records_loss = False

    @property
    def shared_steps(self) -> NDArray[np.int64]:
        """How many steps each rank has done; a rank writes its own entry only."""
        return self.ranks.marks[:, _STEPS]

    @property
    def _turns(self) -> NDArray[np.int64]:
        """How far each rank is: its steps, and those that it missed while it was away."""
        return self.shared_steps + self.ranks.marks[:, _MISSED]

    def begin(self) -> None:
        super().begin()
        self._others = int(self.shared_steps.sum())

    def finish(self) -> None:
        self.ranks.job_steps[self.rank] = max(self.next_steps, self.update.steps)  # none twice
        self.update.apply()
        self.flat.zero_grad()
        self.spread()

    def spread(self) -> None:
        between = int(self.shared_steps.sum()) - self._others
        self.behind += between
        self.most_behind = max(self.most_behind, between)
        self.steps += 1
        self.shared_steps[self.rank] += 1

    def loss(self, local_loss: Tensor) -> Tensor:
        """The mean over own samples."""
        return local_loss / self.batch_fraction if self.batch_fraction else local_loss

    # ------------------------------------------------------------------ around a run

    @contextmanager
    def full_weights(self, optimizer: bool = False) -> Iterator[None]:
        mine = self._turns[self.rank]
        self._wait_for(lambda peer: bool(self._turns[peer] < mine))
        self.lowest_survivor = next(r for r in self._present() if not self.ranks.has_died(r))
        with self._settings.as_asked():
            yield

    # ------------------------------------------------------------------ workers that come back

    def come_back(self) -> Comeback | None:
        """None where the other workers have not begun to train."""
        turns = self._turns
        if not self._is_away or not int(turns.max()):
            return None
        self.ranks.marks[self.rank, _MISSED] = int(turns.max()) - int(self.shared_steps[self.rank])
        return self._take_place()

    def after_load(self) -> None:
        """All workers have written the same shared weights; none trains before the last one has."""
        self._settings.take()
        self._put_sums(new=True)
        if not self._is_apart:  # else the job lets all workers meet after it
            self.group.barrier().wait()

    def report(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "bytes_sent": 0,
            "shared_bytes": len(self.ranks.memory),
            "updates_in_between": self.behind / max(1, self.steps),
            "most_updates_in_between": self.most_behind,
        }

    def summary(self) -> list[str]:
        mean = self.behind / max(1, self.steps)
        return [
            f"between reading and writing the weights others made {mean:.1f} updates on average"
        ]

    def _put_sums(self, new: bool = False) -> None:
        """Let the optimizer use the shared sums, which are to be its own if those are new."""
        if not self._shared_sums:
            return
        state = self.update.optimizer.state
        for p, shared in zip(self.flat.params, self._shared_sums, strict=True):
            if new:
                shared.copy_(state[p]["sum"])
            state[p]["sum"] = shared


class Settings:
    """The optimizer's settings as hogwild needs them, and as they were asked for."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, momentum: bool, say: Callable[[str], None]
    ) -> None:
        self._optimizer = optimizer
        self._momentum = momentum
        self._say = say
        self.take()

    def take(self) -> None:
        """What stands in the optimizer now is what was asked for: use it without momentum."""
        self._used = [(group, self._fitting(group)) for group in self._optimizer.param_groups]
        self._asked = [(group, {key: group[key] for key in used}) for group, used in self._used]
        _put(self._used)

    @contextmanager
    def as_asked(self) -> Iterator[None]:
        """For a checkpoint: another strategy may go on from it."""
        _put(self._asked)
        try:
            yield
        finally:
            _put(self._used)

    def _fitting(self, group: dict[str, Any]) -> dict[str, Any]:
        if self._momentum:
            return {}
        if "betas" in group:
            name = type(self._optimizer).__name__
            raise BadInput(
                f"hogwild keeps no momentum by default, and {name} has no form without it "
                "(betas): concurrent updates of other workers act as momentum already; take SGD or "
                "Adagrad, or hogwild(momentum=True)"
            )
        if not group.get("momentum"):
            return {}
        momentum = group["momentum"]
        shorter = f", so steps are {1 / (1 - momentum):.3g} times shorter" if momentum < 1 else ""
        self._say(
            f"hogwild sets momentum={momentum:g} to 0{shorter}: every worker would push on with a "
            "momentum of its own on weights that the others have moved, and late updates act as "
            "momentum by themselves; hogwild(momentum=True) keeps it"
        )
        return {"momentum": 0.0, **({"nesterov": False} if "nesterov" in group else {})}


def _put(settings: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for group, values in settings:
        group.update(values)


@runs(Hogwild)
class HogwildPlan(SyncPlan[Hogwild]):
    def build(self, replica: Replica) -> Sync:
        if replica.group.size == 1:
            return LocalSync(replica)
        return HogwildSync(replica, self.term.momentum)
