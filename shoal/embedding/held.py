"""Which rows of a shard are in memory: rows come with their first use, and may leave.

    index[slot]    position + 1 of a row, in the order of first use; 0: not used
                   -(position + 1) of an id that waits for its `min_count`-th sight

Rows that have left (`ttl_steps`) are removed when they are looked for, and all of them from time
to time: a row stays in memory at most a quarter longer than its `ttl_steps`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.embedding.chunks import ReservedArray, RowPool, row_columns, waiting_columns
from shoal.embedding.hashing import Ids
from shoal.embedding.row_copy import Rows, copy_rows, take_rows
from shoal.embedding.spec import RowOptimizer, TableSpec
from shoal.errors import BadInput


class DirectRows(NamedTuple):
    """`positions[id - low]` is the position + 1 of a row; 0: it was not used yet."""

    positions: NDArray[np.int32]
    low: int
    rows: Rows


class HeldRows:
    """The rows of one shard with their optimizer state, and the ids that wait."""

    def __init__(self, spec: TableSpec, shard: int, shards: int, optimizer: RowOptimizer | None):
        """MemoryError or ValueError if the system does not reserve the memory."""
        capacity = spec.rows_of(shard, shards)
        index = ReservedArray((capacity,), torch.int32, gives_back=False)
        comes_and_goes = spec.ttl_steps is not None
        self._spec = spec
        self._shard = shard
        self._shards = shards
        self._index = index.tensor.numpy()
        self._swept = 0  # the step of the latest sweep
        self.rows = RowPool(capacity, row_columns(spec, optimizer), comes_and_goes)
        waiting = capacity if spec.min_count > 1 else 0
        self.waiting = RowPool(waiting, waiting_columns(spec), gives_back=True)
        self._rows_array: Rows = self.rows["rows"].numpy()
        self._direct: DirectRows | None = None
        if spec.keeps_rows and spec.placement == "range":
            low = shard * -(-spec.num_rows // shards)
            self._direct = DirectRows(self._index, low, self._rows_array)

    def set_optimizer(self, optimizer: RowOptimizer | None) -> None:
        """Begin with the initial state of an optimizer, and at step 0."""
        wanted = row_columns(self._spec, optimizer)
        for name in set(self.rows.names) - {"ids", *wanted}:
            self.rows.drop_column(name)
        for name in [name for name in wanted if name != "rows"]:
            self.rows.set_column(name, wanted[name])
        if self._spec.ttl_steps is not None:
            self.waiting.set_column("last", wanted["last"])
        self._swept = 0

    def slots(self, ids: Tensor) -> Ids:
        """Where the index has these rows; BadInput for rows of other shards."""
        self._spec.check(ids)
        owners, slots = self._spec.locate(ids, self._shards)
        is_foreign = owners != self._shard
        if is_foreign.any():
            row = int(ids[int(is_foreign.argmax())])
            raise BadInput(
                f"row {row} of {self._spec} is not owned by shard {self._shard} of {self._shards}"
            )
        return slots

    def owned(self, ids: Tensor) -> Tensor:
        """Which of these ids are rows of this shard."""
        return torch.from_numpy(self._spec.locate(ids, self._shards)[0] == self._shard)

    def get(self, ids: Tensor, step: int) -> Tensor:
        """Copies of rows after `step`. Where all rows stay, they take memory from now on."""
        rows = torch.empty(ids.numel(), self._spec.dim)
        self._spec.check(ids)
        self.copy(ids.contiguous().numpy(), step, rows.numpy(), None)
        return rows

    @property
    def direct(self) -> DirectRows | None:
        """How to find rows without a hash; None if rows come and go, or are placed by hash."""
        return self._direct

    def copy(self, numbers: Ids, step: int, target: Rows, places: Ids | None) -> None:
        """The same, into the rows of `target` at these places."""
        spec = self._spec
        direct = self._direct
        if direct is not None and take_rows(
            direct.positions, direct.low, numbers, direct.rows, target, places
        ):
            return
        ids = torch.from_numpy(numbers)
        slots = self.slots(ids)
        if not spec.keeps_rows:
            rows = self._get_present(ids, slots, step)
            copy_rows(rows, None, torch.from_numpy(target), places)
        elif not take_rows(self._index, 0, slots, self._rows_array, target, places):
            positions = self.use(ids, slots).numpy()
            copy_rows(self.rows["rows"], positions, torch.from_numpy(target), places)

    def _get_present(self, ids: Tensor, slots: Ids, step: int) -> Tensor:
        """Rows that have not left; the initial values of others."""
        positions = torch.from_numpy(self._index[slots]).long() - 1
        is_held = positions >= 0
        positions = positions.clamp(min=0)
        is_held &= ~self._is_idle(self.rows, positions, step)
        rows = self.rows["rows"].index_select(0, positions)
        if not is_held.all():
            rows[~is_held] = self._spec.initial(ids[~is_held])
        return rows

    # ------------------------------------------------------------------ rows that come

    def see(self, ids: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
        """Step `step` has these rows, in order and each once.

        Returns the positions of rows that are trained, and which they are; None: all.
        """
        slots = self.slots(ids)
        self._remove_idle(slots, step - 1)
        is_trained = None
        if self._spec.min_count > 1:
            is_trained = self._count(ids, slots, step)
            ids = ids[is_trained]
            slots = slots[is_trained.numpy()]
        positions = self.use(ids, slots)
        if self._spec.ttl_steps is not None:
            self.rows["last"][positions] = step
        return positions, is_trained

    def _count(self, ids: Tensor, slots: Ids, step: int) -> Tensor:
        """Count a sight of each id; whether it is trained."""
        self.wait(ids[torch.from_numpy(self._index[slots] == 0)])
        waiting = -torch.from_numpy(self._index[slots]).long() - 1
        is_waiting = waiting >= 0
        waiting = waiting[is_waiting]
        counts = self.waiting["count"][waiting] + 1
        self.waiting["count"][waiting] = counts
        if self._spec.ttl_steps is not None:
            self.waiting["last"][waiting] = step
        is_enough = counts >= self._spec.min_count
        self._remove(self.waiting, waiting[is_enough])
        is_trained = ~is_waiting
        is_trained[is_waiting] = is_enough
        return is_trained

    def wait(self, ids: Tensor) -> Tensor:
        """Positions among the waiting ids for ids that are not held; each comes once."""
        positions = self.waiting.append(ids)
        self._index[self.slots(ids)] = -positions.int().numpy() - 1
        return positions

    def use(self, ids: Tensor, slots: Ids) -> Tensor:
        """The positions of rows; rows that are used for the first time are initialized."""
        positions = torch.from_numpy(self._index[slots])
        is_new = positions <= 0
        if is_new.any():
            self._remove(self.waiting, torch.unique(-positions[positions < 0].long() - 1))
            new = torch.unique(ids[is_new])
            placed = self.rows.append(new)
            self.rows["rows"][int(placed[0]) : int(placed[-1]) + 1] = self._spec.initial(new)
            self._index[self.slots(new)] = placed.int().numpy() + 1
            positions = torch.from_numpy(self._index[slots])
        return positions.long() - 1

    def not_held(self, ids: Tensor) -> Tensor:
        """Which of these ids are neither trained nor waiting."""
        return torch.from_numpy(self._index[self.slots(ids)] == 0)

    # ------------------------------------------------------------------ rows that go

    def present(self, pool: RowPool, step: int) -> Tensor:
        """Positions of the entries that have not left after `step`, in the order of their ids."""
        positions = torch.argsort(pool["ids"][: pool.size])
        return positions[~self._is_idle(pool, positions, step)]

    def count(self, step: int) -> int:
        """Rows that have not left after `step`."""
        positions = torch.arange(self.rows.size)
        return int((~self._is_idle(self.rows, positions, step)).sum())

    def sweep(self, step: int, at_once: bool = True) -> None:
        """Remove all that has left after `step`; or only if it is worth a look at all rows."""
        ttl_steps = self._spec.ttl_steps
        if ttl_steps is None or (not at_once and step - self._swept <= ttl_steps // 4):
            return
        self._swept = step
        for pool in (self.rows, self.waiting):
            positions = torch.arange(pool.size)
            self._remove(pool, positions[self._is_idle(pool, positions, step)])

    def _is_idle(self, pool: RowPool, positions: Tensor, step: int) -> Tensor:
        """Whether entries at these positions have left after `step`."""
        if self._spec.ttl_steps is None:
            return torch.zeros(len(positions), dtype=torch.bool)
        return step - pool["last"][positions] >= self._spec.ttl_steps

    def _remove_idle(self, slots: Ids, step: int) -> None:
        """Remove what has left among these."""
        if self._spec.ttl_steps is None:
            return
        found = torch.from_numpy(self._index[slots]).long()
        for pool, positions in (
            (self.rows, found[found > 0] - 1),
            (self.waiting, -found[found < 0] - 1),
        ):
            self._remove(pool, positions[self._is_idle(pool, positions, step)])

    def _remove(self, pool: RowPool, positions: Tensor) -> None:
        if not len(positions):
            return
        self._index[self.slots(pool["ids"][positions])] = 0
        moved = pool.remove(positions)
        sign = 1 if pool is self.rows else -1
        self._index[self.slots(moved.ids)] = sign * (moved.positions.int().numpy() + 1)
