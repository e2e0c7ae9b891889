"""The rows of an embedding table that one shard holds.

    id ──shuffle or range──▶ owner (shard), slot (one of its rows)
    index[slot] ──▶ position + 1, in the order of first use; 0: not used
                    -(position + 1) of an id that waits for its `min_count`-th sight
    rows[position], optimizer state[position]

Memory for all rows is reserved and not used: a row takes memory from its first use on. A row that
was never used costs 4 bytes of index. Initial values are a hash of seed, table and id. Rows that
have left (`ttl_steps`) are removed when they are looked for, and all of them from time to time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import BadInput
from shoal.runtime.wording import counted
from shoal.server.embedding.chunks import (
    WAITING,
    Chunk,
    ReservedArray,
    RowPool,
    check_rows,
    fit_chunks,
    is_behind,
    row_columns,
    waiting_columns,
)
from shoal.server.embedding.hashing import Ids
from shoal.server.embedding.row_copy import Rows, copy_rows, take_rows
from shoal.server.embedding.spec import LARGEST_SHARD, RowOptimizer, TableSpec


class DirectRows(NamedTuple):
    """`positions[id - low]` is the position + 1 of a row; 0: it was not used yet."""

    positions: NDArray[np.int32]
    low: int
    rows: Rows


CHUNK_ROWS = 1 << 16  # rows that `state` gives at a time
MAX_SHARDS = 1024  # as in _rows.c


class RowTable:
    """One shard of an embedding table. One thread at a time may use it.

    `pull` costs a gather, `push` a gather and a scatter for each tensor of the optimizer. Both
    cost 4 hashes per id, and dim/2 hashes for each row that is used for the first time.
    """

    def __init__(self, spec: TableSpec, shard: int = 0, shards: int = 1):
        if shards > MAX_SHARDS:
            raise BadInput(f"{spec} has {shards} servers: use {MAX_SHARDS} at most")
        if spec.rows_of(shard, shards) > LARGEST_SHARD:
            raise BadInput(
                f"{spec} has too many rows for {counted(shards, 'server')}: use more servers"
            )
        self.spec = spec
        self.shard = shard
        self.shards = shards
        self.optimizer = spec.optimizer
        self.clear()

    def clear(self) -> None:
        """Reset all rows to their initial values, and free their memory."""
        try:
            self._reserve(self.spec.rows_of(self.shard, self.shards))
        except (MemoryError, ValueError) as error:  # the system does not reserve it
            raise BadInput(
                f"shard {self.shard} of {self.spec} does not fit: "
                f"{self.spec.rows_of(self.shard, self.shards)} rows of {self.spec.dim} numbers; "
                "use more servers"
            ) from error

    def _reserve(self, capacity: int) -> None:
        spec = self.spec
        self.steps = 0  # updates of the table over all shards, as far as this shard knows
        self._swept = 0  # the step of the latest sweep
        index = ReservedArray((capacity,), torch.int32, gives_back=False)
        self._index = index.tensor.numpy()
        columns = row_columns(spec, self.optimizer)
        self.rows = RowPool(capacity, columns, gives_back=spec.ttl_steps is not None)
        waiting = capacity if spec.min_count > 1 else 0
        self.waiting = RowPool(waiting, waiting_columns(spec), gives_back=True)
        self._rows_array: Rows = self.rows["rows"].numpy()
        self.direct: DirectRows | None = None  # None if rows come and go, or are dealt by hash
        if spec.keeps_rows and (spec.placement == "range" or self.shards == 1):
            low = self.shard * -(-spec.num_rows // self.shards)
            self.direct = DirectRows(self._index, low, self._rows_array)

    def set_optimizer(self, optimizer: RowOptimizer | None) -> None:
        """Train with this optimizer from now on, from its initial state and step 0."""
        self.sweep()
        wanted = row_columns(self.spec, optimizer)
        for name in set(self.rows.names) - {"ids", *wanted}:
            self.rows.drop_column(name)
        for name in [name for name in wanted if name != "rows"]:
            self.rows.set_column(name, wanted[name])
        if self.spec.ttl_steps is not None:
            self.waiting.set_column("last", wanted["last"])
        self._swept = self.steps = 0
        self.optimizer = optimizer

    def slots(self, ids: Tensor) -> Ids:
        """Where the index has these rows; BadInput for rows of other shards."""
        self.spec.check(ids)
        owners, slots = self.spec.locate(ids, self.shards)
        is_foreign = owners != self.shard
        if is_foreign.any():
            row = int(ids[int(is_foreign.argmax())])
            raise BadInput(
                f"row {row} of {self.spec} is not owned by shard {self.shard} of {self.shards}"
            )
        return slots

    def pull(self, ids: Tensor) -> Tensor:
        """Copies of rows, [n, dim]; ids may repeat. Rows that all stay take memory from now on."""
        rows = torch.empty(ids.numel(), self.spec.dim)
        self.spec.check(ids)
        self.copy(ids.contiguous().numpy(), rows.numpy())
        return rows

    def copy(self, numbers: Ids, target: Rows, places: Ids | None = None) -> None:
        """Rows into `target`, [m, dim], at these places; None: one after the other."""
        spec = self.spec
        direct = self.direct
        if direct is not None and take_rows(
            direct.positions, direct.low, numbers, direct.rows, target, places
        ):
            return
        ids = torch.from_numpy(numbers)
        slots = self.slots(ids)
        if not spec.keeps_rows:
            rows = self._get_present(ids, slots)
            copy_rows(rows, None, torch.from_numpy(target), places)
        elif not take_rows(self._index, 0, slots, self._rows_array, target, places):
            positions = self.use(ids, slots).numpy()
            copy_rows(self.rows["rows"], positions, torch.from_numpy(target), places)

    def _get_present(self, ids: Tensor, slots: Ids) -> Tensor:
        """Rows that have not left; the initial values of others."""
        positions = torch.from_numpy(self._index[slots]).long() - 1
        is_held = positions >= 0
        positions = positions.clamp(min=0)
        is_held &= ~self._is_idle(self.rows, positions, self.steps)
        rows = self.rows["rows"].index_select(0, positions)
        if not is_held.all():
            rows[~is_held] = self.spec.initial(ids[~is_held])
        return rows

    # ------------------------------------------------------------------ rows that come

    def see(self, ids: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
        """Step `step` has these rows, in order and each once.

        Returns the positions of rows that are trained, and which they are; None: all.
        """
        slots = self.slots(ids)
        self._remove_idle(slots, step - 1)
        is_trained = None
        if self.spec.min_count > 1:
            is_trained = self._count(ids, slots, step)
            ids = ids[is_trained]
            slots = slots[is_trained.numpy()]
        positions = self.use(ids, slots)
        if self.spec.ttl_steps is not None:
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
        if self.spec.ttl_steps is not None:
            self.waiting["last"][waiting] = step
        is_enough = counts >= self.spec.min_count
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
            self.rows["rows"][int(placed[0]) : int(placed[-1]) + 1] = self.spec.initial(new)
            self._index[self.slots(new)] = placed.int().numpy() + 1
            positions = torch.from_numpy(self._index[slots])
        return positions.long() - 1

    # ------------------------------------------------------------------ rows that go

    def present(self, pool: RowPool) -> Tensor:
        """Positions of the entries that have not left, in the order of their ids."""
        positions = torch.argsort(pool["ids"][: pool.size])
        return positions[~self._is_idle(pool, positions, self.steps)]

    def __len__(self) -> int:
        """The number of rows that have been used and have not left."""
        positions = torch.arange(self.rows.size)
        return int((~self._is_idle(self.rows, positions, self.steps)).sum())

    def sweep(self, at_once: bool = True) -> None:
        """Remove all that has left; or only if it is worth a look at all rows."""
        step = self.steps
        ttl_steps = self.spec.ttl_steps
        if ttl_steps is None or (not at_once and step - self._swept <= ttl_steps // 4):
            return
        self._swept = step
        for pool in (self.rows, self.waiting):
            positions = torch.arange(pool.size)
            self._remove(pool, positions[self._is_idle(pool, positions, step)])

    def _is_idle(self, pool: RowPool, positions: Tensor, step: int) -> Tensor:
        """Whether entries at these positions have left after `step`."""
        if self.spec.ttl_steps is None:
            return torch.zeros(len(positions), dtype=torch.bool)
        return step - pool["last"][positions] >= self.spec.ttl_steps

    def _remove_idle(self, slots: Ids, step: int) -> None:
        """Remove what has left among these."""
        if self.spec.ttl_steps is None:
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
        moved_ids, places = pool.remove(positions)
        sign = 1 if pool is self.rows else -1
        self._index[self.slots(moved_ids)] = sign * (places.int().numpy() + 1)

    # ------------------------------------------------------------------ training

    def push(
        self, ids: Tensor, grads: Tensor, lr: float | None = None, step: int | None = None
    ) -> None:
        """One update of the rows `ids` by `grads`, [n, dim]; gradients of equal ids are summed.

        `lr` replaces that of the optimizer. `step` is the number of this update of the table,
        from 1 on, which Adam needs: a shard sees only updates of its own rows. Without `step`
        the shard counts its own updates.
        """
        optimizer = self.optimizer
        if optimizer is None:
            raise BadInput(f"{self.spec} has no optimizer to train its rows with")
        lr = optimizer.lr if lr is None else lr
        if not math.isfinite(lr) or (step is not None and step < 1):
            raise BadInput(f"{self.spec} cannot be updated with lr={lr} as step {step}")
        self.spec.check(ids)
        check_rows(self.spec, "gradients", ids, grads)
        ids, grads = sum_duplicates(ids, grads)
        seen = self.steps + 1 if step is None else max(self.steps, step)
        positions, is_trained = self.see(ids, seen)
        self.steps = seen
        grads = grads if is_trained is None else grads[is_trained]
        self._update(optimizer, positions, grads, lr, step or seen)
        self.sweep(at_once=False)

    def _update(
        self, optimizer: RowOptimizer, positions: Tensor, grads: Tensor, lr: float, step: int
    ) -> None:
        change = grads
        scale = 1.0
        if optimizer.kind == "adam":
            change, scale = self._adam(optimizer, positions, grads, step)
        elif optimizer.kind == "adagrad":
            sums = self.rows["sum"].index_add_(0, positions, grads * grads)
            change = grads / sums.index_select(0, positions).sqrt_().add_(optimizer.eps)
        self.rows["rows"].index_add_(0, positions, change, alpha=-lr * scale)

    def _adam(
        self, optimizer: RowOptimizer, positions: Tensor, grads: Tensor, step: int
    ) -> tuple[Tensor, float]:
        """The direction, and the correction for averages that started from 0."""
        averages = []
        for name, new, beta in (
            ("exp_avg", grads, optimizer.betas[0]),
            ("exp_avg_sq", grads * grads, optimizer.betas[1]),
        ):
            old = self.rows[name].index_select(0, positions)
            averages.append(old.add_((new - old).mul_(1 - beta)))
            self.rows[name].index_copy_(0, positions, averages[-1])
        correction = math.sqrt(1 - optimizer.betas[1] ** step) / (1 - optimizer.betas[0] ** step)
        return averages[0] / averages[1].sqrt().add_(optimizer.eps), correction

    # ------------------------------------------------------------------ saving

    def state(self, chunk_rows: int = CHUNK_ROWS, cursor: int = 0) -> Iterator[dict[str, Tensor]]:
        """All tensors that a checkpoint needs, besides `steps`, in chunks of copies.

        `chunks.py` names them. Rows that were never used, or have left, are omitted: they follow
        from the spec of the table. Ids ascend, so copies of a table give the same chunks; `cursor`
        is where to go on (`chunks.cursor_after`). Changes nothing.
        """
        for pool, prefix in ((self.rows, ""), (self.waiting, WAITING)):
            positions = self.present(pool)
            positions = positions[is_behind(prefix, pool["ids"][positions], cursor)]
            for entries in torch.split(positions, chunk_rows):
                if len(entries):
                    yield {prefix + name: pool[name][entries] for name in pool.names}

    def load_state(self, chunks: Iterable[Chunk], steps: int) -> None:
        """Replace all rows by saved ones, from any number of shards; skip rows of other shards.

        If a chunk does not fit, nothing is loaded.
        """
        if steps < 0:
            raise BadInput(f"{self.spec} cannot have been updated {steps} times")
        chunks = list(chunks)
        for chunk in chunks:
            fit_chunks(self.spec, self.optimizer, chunk, steps)
        self.clear()
        self.steps = steps
        for chunk in chunks:
            self.load_chunk(chunk)

    def load_chunk(self, chunk: Chunk) -> None:
        """Load the rows of this shard from a saved chunk."""
        for part in fit_chunks(self.spec, self.optimizer, chunk, self.steps):
            prefix = "" if "ids" in part else WAITING
            columns = {name.removeprefix(prefix): tensor for name, tensor in part.items()}
            owners = self.spec.locate(columns["ids"], self.shards)[0]
            columns = _select(columns, torch.from_numpy(owners == self.shard))
            if prefix:
                is_new = torch.from_numpy(self._index[self.slots(columns["ids"])] == 0)
                columns = _select(columns, is_new)
                _load(self.waiting, columns, self.wait(columns["ids"]))
            else:
                ids = columns["ids"]
                _load(self.rows, columns, self.use(ids, self.slots(ids)))

    def check(self, ids: Tensor, grads: Tensor) -> None:
        """Refuse ids of other shards, and gradients of another shape."""
        self.spec.check(ids)
        check_rows(self.spec, "gradients", ids, grads)
        self.slots(ids)


def _select(columns: Chunk, is_selected: Tensor) -> dict[str, Tensor]:
    return {name: tensor[is_selected] for name, tensor in columns.items()}


def _load(pool: RowPool, columns: Chunk, positions: Tensor) -> None:
    for name in pool.names:
        pool[name].index_copy_(0, positions, columns[name])


def sum_duplicates(keys: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Unique keys in ascending order, and the sum of the rows of each, in the given order."""
    unique, inverse = torch.unique(keys, return_inverse=True)
    if torch.equal(unique, keys):
        return keys, rows
    return unique, rows.new_zeros(len(unique), rows.shape[1]).index_add_(0, inverse, rows)
