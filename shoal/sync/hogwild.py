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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.objects import all_gather_bytes
from shoal.errors import BadInput
from shoal.runtime.waits import Backoff, waiting
from shoal.strategy.sync_terms.hogwild import Hogwild
from shoal.sync.base import Comeback, Replica, Sync, SyncPlan, runs
from shoal.sync.lasting import comes_back, join_memory
from shoal.sync.local import LocalSync
from shoal.transport.shm.shared_buffer import LastingBuffer, SharedBuffer

_ALIGN = 64
_FIRST_LOOK_S = 0.0005
_LONGEST_LOOK_S = 0.02


class HogwildSync(Sync):
    """A step exchanges nothing: it computes on the shared weights and changes them.

    The weights that count are the shared ones, when all workers have come as far as this one.
    While one worker saves, others may already train on. The state of optimizers other than
    Adagrad is each worker's own, and rank 0's is saved. `statistics` (BatchNorm's running ones)
    are shared like the weights.
    """

    synchronous = False
    collects = False

    def __init__(self, replica: Replica, momentum: bool):
        flat = replica.flat
        group = replica.group
        statistics = replica.statistics
        self.flat = flat
        self.update = replica.update
        self.group = group
        self.rank = group.rank
        self.size = group.size
        self.momentum = momentum
        self._settings = Settings(self.update.optimizer, momentum, replica.say)
        tensors = [flat.data, *statistics, *self._sums()]
        places, num_bytes = _lay_out(tensors)
        self._generations: Sequence[int] | None = None  # of the workers at a meeting
        self._is_away = comes_back(replica) and replica.config.generation > 0
        self._is_apart = comes_back(replica)  # workers come when they come
        views = self._join(replica, tensors, places, num_bytes)
        flat.move_to(views[0])
        for tensor, view in zip(statistics, views[1:], strict=False):
            tensor.data = view
        self._shared_sums = views[1 + len(statistics) :]
        self._put_sums()
        self.steps = self.behind = self.most_behind = 0
        self._others = 0
        flat.grads.records_loss = False

    def _join(
        self, replica: Replica, tensors: list[Tensor], places: list[int], num_bytes: int
    ) -> list[Tensor]:
        """The tensors in the memory of all workers."""
        run_dir = replica.config.run_dir
        offset = LastingBuffer.needed_bytes(self.size, 0)

        def fill(memory: mmap.mmap) -> None:
            torch._foreach_copy_(_views(tensors, places, memory, offset), tensors)

        if self._is_apart and run_dir is not None:
            needed = LastingBuffer.needed_bytes(self.size, num_bytes)
            place = (self.rank, self.size, replica.config.generation)
            memory = join_memory(replica, needed, fill)
            self.buffer: SharedBuffer = LastingBuffer(memory, place, run_dir.has_ended)
            return _views(tensors, places, self.buffer.memory, offset)
        exchange = partial(all_gather_bytes, self.group)
        buffer = SharedBuffer.join(exchange, self.rank, self.size, num_bytes)
        if buffer is None:
            raise BadInput(
                "hogwild keeps the weights in memory that all workers share, and these share "
                f"none: run them as one user on one Linux host with {num_bytes / 1e9:.3g} GB free"
            )
        self.buffer = buffer
        if self.rank == 0:
            fill(buffer.memory)
        self.group.barrier().wait()
        return _views(tensors, places, buffer.memory, offset)

    def begin(self) -> None:
        self.buffer.note_job_steps(self.update.steps)
        self._others = int(self.buffer.steps.sum())

    def reduce(self, bucket: slice) -> None:
        return None

    def finish(self) -> None:
        self.buffer.note_job_steps(max(self.next_steps, self.update.steps))  # none is done twice
        self.update.apply()
        self.flat.zero_grad()
        self.spread()

    def spread(self) -> None:
        between = int(self.buffer.steps.sum()) - self._others
        self.behind += between
        self.most_behind = max(self.most_behind, between)
        self.steps += 1
        self.buffer.steps[self.rank] += 1

    def loss(self, local_loss: Tensor) -> Tensor:
        """The mean over own samples."""
        return local_loss / self.batch_fraction if self.batch_fraction else local_loss

    # ------------------------------------------------------------------ around a run

    @contextmanager
    def full_weights(self, optimizer: bool = False) -> Iterator[None]:
        self._wait_for_others()
        present = [r for r in range(self.size) if self._takes_part(r)]
        self.lowest_survivor = next(r for r in present if not self.buffer.has_died(r))
        with self._settings.as_asked():
            yield

    def _wait_for_others(self) -> None:
        """Until none of the others that still train is behind."""
        pause = Backoff(_FIRST_LOOK_S, _LONGEST_LOOK_S)
        mine = self.buffer.turns[self.rank]

        def behind() -> list[int]:
            turns = self.buffer.turns
            present = [peer for peer in range(self.size) if self._takes_part(peer)]
            late = [peer for peer in present if turns[peer] < mine]
            return [peer for peer in late if not self.buffer.has_finished(peer)]

        def whom() -> str:
            return " and ".join(f"rank {peer}" for peer in behind())

        with waiting(f"rank {self.rank}", whom, "the end of a step"):
            while behind():
                pause()

    # ------------------------------------------------------------------ workers that come back

    def come_back(self) -> Comeback | None:
        """None where the other workers have not begun to train."""
        if not self._is_away or not int(self.buffer.turns.max()):
            return None
        self._is_away = False
        lost_at = self.buffer.job_steps(self.rank)
        self.buffer.take_turn()
        self.update.steps = self.buffer.job_steps(self.rank)
        return Comeback(self.update.steps, lost_at)

    def meet(self, number: int, generations: Sequence[int]) -> None:
        self._generations = generations

    def _takes_part(self, peer: int) -> bool:
        generations = self._generations
        return generations is None or generations[peer] == self.buffer.life(peer)

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
            "shared_bytes": len(self.buffer.memory),
            "updates_in_between": self.behind / max(1, self.steps),
            "most_updates_in_between": self.most_behind,
        }

    def summary(self) -> list[str]:
        mean = self.behind / max(1, self.steps)
        return [
            f"between reading and writing the weights others made {mean:.1f} updates on average"
        ]

    def close(self) -> None:
        self.buffer.close()

    def _sums(self) -> list[Tensor]:
        """What Adagrad adds up, parameter by parameter; nothing under other optimizers."""
        optimizer = self.update.optimizer
        if not isinstance(optimizer, torch.optim.Adagrad):
            return []
        return [optimizer.state[p]["sum"] for p in self.flat.params]

    def _put_sums(self, new: bool = False) -> None:
        """Let the optimizer use the shared sums, which are to be its own if those are new."""
        if not self._shared_sums:
            return
        state = self.update.optimizer.state
        for p, shared in zip(self.flat.params, self._shared_sums, strict=True):
            if new:
                shared.copy_(state[p]["sum"])
            state[p]["sum"] = shared


def _views(
    tensors: Sequence[Tensor], places: Sequence[int], memory: mmap.mmap, offset: int
) -> list[Tensor]:
    """The same tensors in this memory."""
    flat = [
        torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=offset + at)
        for t, at in zip(tensors, places, strict=True)
    ]
    return [view.view(tensor.shape) for view, tensor in zip(flat, tensors, strict=True)]


class Settings:
    """The optimizer's settings as hogwild needs them, and as they were asked for."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, momentum: bool, say: Callable[[str], None]
    ) -> None:
        self._groups = optimizer.param_groups
        self._name = type(optimizer).__name__
        self._momentum = momentum
        self._say = say
        self.take()

    def take(self) -> None:
        """What stands in the optimizer now is what was asked for: use it without momentum."""
        self._used = [self._fitting(group) for group in self._groups]
        self._asked = [
            {key: group[key] for key in used}
            for group, used in zip(self._groups, self._used, strict=True)
        ]
        self._put(self._used)

    @contextmanager
    def as_asked(self) -> Iterator[None]:
        """For a checkpoint: another strategy may go on from it."""
        self._put(self._asked)
        try:
            yield
        finally:
            self._put(self._used)

    def _put(self, settings: list[dict[str, Any]]) -> None:
        for group, values in zip(self._groups, settings, strict=True):
            group.update(values)

    def _fitting(self, group: dict[str, Any]) -> dict[str, Any]:
        if self._momentum:
            return {}
        if "betas" in group:
            raise BadInput(
                f"hogwild keeps no momentum by default, and {self._name} has no form without it "
                "(betas): concurrent updates of other workers act as momentum already; take SGD or "
                "Adagrad, or hogwild(momentum=True)"
            )
        if not group.get("momentum"):
            return {}
        self._say(why_no_momentum(group["momentum"]))
        return {"momentum": 0.0, **({"nesterov": False} if "nesterov" in group else {})}


def why_no_momentum(momentum: float) -> str:
    longer = f", so steps are {1 / (1 - momentum):.3g} times shorter" if momentum < 1 else ""
    return (
        f"hogwild sets momentum={momentum:g} to 0{longer}: every worker would push on with a "
        "momentum of its own on weights that the others have moved, and late updates act as "
        "momentum by themselves; hogwild(momentum=True) keeps it"
    )


def _lay_out(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each begins, in bytes, and how many bytes all of them take."""
    places = []
    end = 0
    for tensor in tensors:
        places.append(end)
        end += -(-tensor.nbytes // _ALIGN) * _ALIGN
    return places, end


@runs(Hogwild)
class HogwildPlan(SyncPlan[Hogwild]):
    def build(self, replica: Replica) -> Sync:
        if replica.group.size == 1:
            return LocalSync(replica)
        return HogwildSync(replica, self.term.momentum)
