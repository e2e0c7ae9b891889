"""The rows of an embedding table that one shard holds.

    id ──shuffle or range──▶ owner (shard), slot (one of its rows)
    index[slot] ──▶ position, assigned in the order of first use
    rows[position], optimizer state[position]

Memory for all rows is reserved and not used: a row takes memory from its first use on. A row that
was never used costs 4 bytes of index. Initial values are a hash of seed, table and id.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from shoal.embedding.chunks import WAITING, Chunk, RowPool, check_rows, fit_chunks, is_behind
from shoal.embedding.hashing import Ids
from shoal.embedding.held import DirectRows, HeldRows
from shoal.embedding.row_copy import Rows
from shoal.embedding.spec import LARGEST_SHARD, RowOptimizer, TableSpec
from shoal.errors import BadInput
from shoal.runtime.wording import counted

CHUNK_ROWS = 1 << 16  # rows that `state` gives at a time


class RowTable:
    """One shard of an embedding table. One thread at a time may use it.

    `pull` costs a gather, `push` a gather and a scatter for each tensor of the optimizer. Both
    cost 4 hashes per id, and dim/2 hashes for each row that is used for the first time.
    """

    def __init__(self, spec: TableSpec, shard: int = 0, shards: int = 1):
        self.spec = spec
        self.shard = shard
        self.shards = shards
        if spec.rows_of(shard, shards) > LARGEST_SHARD:
            raise BadInput(
                f"{spec} has too many rows for {counted(shards, 'server')}: use more servers"
            )
        self.optimizer = spec.optimizer
        self.clear()

    def __len__(self) -> int:
        """The number of rows that have been used and have not left."""
        return self._held.count(self.steps)

    def clear(self) -> None:
        """Reset all rows to their initial values, and free their memory."""
        try:
            self._held = HeldRows(self.spec, self.shard, self.shards, self.optimizer)
        except (MemoryError, ValueError) as error:
            raise BadInput(
                f"shard {self.shard} of {self.spec} does not fit: "
                f"{self.spec.rows_of(self.shard, self.shards)} rows of {self.spec.dim} numbers; "
                "use more servers"
            ) from error
        self.steps = 0  # updates of the table over all shards, as far as this shard knows

    def set_optimizer(self, optimizer: RowOptimizer | None) -> None:
        """Train with this optimizer from now on, from its initial state."""
        self._held.sweep(self.steps)
        self._held.set_optimizer(optimizer)
        self.optimizer = optimizer
        self.steps = 0

    def pull(self, ids: Tensor) -> Tensor:
        """Copies of rows, [n, dim]. Ids may repeat."""
        return self._held.get(ids, self.steps)

    def copy(self, ids: Ids, target: Rows, places: Ids | None = None) -> None:
        """Rows into `target`, [m, dim], at these places; None: one after the other."""
        self._held.copy(ids, self.steps, target, places)

    @property
    def direct(self) -> DirectRows | None:
        """How to find rows that were used, where they are placed by range and stay."""
        return self._held.direct

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
        positions, is_trained = self._held.see(ids, seen)
        self.steps = seen
        grads = grads if is_trained is None else grads[is_trained]
        self._update(optimizer, positions, grads, lr, step or seen)
        self._held.sweep(self.steps, at_once=False)

    def _update(
        self, optimizer: RowOptimizer, positions: Tensor, grads: Tensor, lr: float, step: int
    ) -> None:
        change = grads
        scale = 1.0
        if optimizer.kind == "adam":
            change, scale = self._adam(optimizer, positions, grads, step)
        elif optimizer.kind == "adagrad":
            change = self._adagrad(optimizer, positions, grads)
        self._held.rows["rows"].index_add_(0, positions, change, alpha=-lr * scale)

    def _adagrad(self, optimizer: RowOptimizer, positions: Tensor, grads: Tensor) -> Tensor:
        sums = self._held.rows["sum"].index_add_(0, positions, grads * grads)
        return grads / sums.index_select(0, positions).sqrt_().add_(optimizer.eps)

    def _adam(
        self, optimizer: RowOptimizer, positions: Tensor, grads: Tensor, step: int
    ) -> tuple[Tensor, float]:
        """The direction, and the correction for averages that started from 0."""
        averages = []
        for name, new, beta in (
            ("exp_avg", grads, optimizer.betas[0]),
            ("exp_avg_sq", grads * grads, optimizer.betas[1]),
        ):
            old = self._held.rows[name].index_select(0, positions)
            averages.append(old.add_((new - old).mul_(1 - beta)))
            self._held.rows[name].index_copy_(0, positions, averages[-1])
        correction = math.sqrt(1 - optimizer.betas[1] ** step) / (1 - optimizer.betas[0] ** step)
        return averages[0] / averages[1].sqrt().add_(optimizer.eps), correction

    # ------------------------------------------------------------------ saving

    def state(self, chunk_rows: int = CHUNK_ROWS, cursor: int = 0) -> Iterator[dict[str, Tensor]]:
        """All tensors that a checkpoint needs, besides `steps`, in chunks of copies.

        `chunks.py` names them. Rows that were never used, or have left, are omitted: they follow
        from the spec of the table. Ids ascend, so copies of a table give the same chunks; `cursor`
        is where to go on (`chunks.cursor_after`). Changes nothing.
        """
        for pool, prefix in ((self._held.rows, ""), (self._held.waiting, WAITING)):
            positions = self._held.present(pool, self.steps)
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
            columns = _select(columns, self._held.owned(columns["ids"]))
            if prefix:
                columns = _select(columns, self._held.not_held(columns["ids"]))
                _load(self._held.waiting, columns, self._held.wait(columns["ids"]))
            else:
                ids = columns["ids"]
                _load(self._held.rows, columns, self._held.use(ids, self._held.slots(ids)))

    def check(self, ids: Tensor, grads: Tensor) -> None:
        """Refuse ids of other shards, and gradients of another shape."""
        self.spec.check(ids)
        check_rows(self.spec, "gradients", ids, grads)
        self._held.slots(ids)


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
