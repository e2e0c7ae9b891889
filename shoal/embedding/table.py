"""The rows of an embedding table that one shard holds.

    id ──shuffle──▶ owner (shard), slot (one of its rows)
    index[slot] ──▶ position, assigned in the order of first use
    rows[position], optimizer state[position]

Memory for all rows is reserved and not used: a row takes memory from its first use on. A row that
was never used costs 4 bytes of index. Initial values are a hash of seed, table and id.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from shoal.embedding.hashing import Ids
from shoal.embedding.spec import LARGEST_SHARD, RowOptimizer, TableSpec
from shoal.errors import BadInput

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
        self._capacity = spec.rows_of(shard, shards)
        if self._capacity > LARGEST_SHARD:
            raise BadInput(f"{spec} has too many rows for {shards} servers: use more servers")
        self.optimizer = spec.optimizer
        self.clear()

    def __len__(self) -> int:
        """The number of rows that have been used."""
        return self._used

    def clear(self) -> None:
        """Reset all rows to their initial values, and free their memory."""
        self._used = 0
        self._index = self._reserve((self._capacity,), np.int32)  # position + 1; 0: not used yet
        self._ids = self._reserve((self._capacity,), np.int64)
        self._rows = self._reserve_rows()
        self.set_optimizer(self.optimizer)

    def set_optimizer(self, optimizer: RowOptimizer | None) -> None:
        """Train with this optimizer from now on, from its initial state."""
        self.optimizer = optimizer
        self.steps = 0  # updates of the table over all shards, as far as this shard knows
        initial = optimizer.initial_state() if optimizer is not None else {}
        self._state = {name: self._reserve_rows() for name in initial}
        for name, value in initial.items():
            if value:
                self._state[name][: self._used] = value

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the tensors of a chunk, without its ids."""
        return ("rows", *self._state)

    def pull(self, ids: Tensor) -> Tensor:
        """Copies of rows, [n, dim]. Ids may repeat."""
        return self._rows.index_select(0, self._positions(ids))

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
        check_rows(self.spec, "gradients", ids, grads)
        positions, grads = sum_duplicates(self._positions(ids), grads)
        self.steps = self.steps + 1 if step is None else max(self.steps, step)
        if optimizer.kind == "adam":
            change, scale = self._adam(optimizer, positions, grads, step or self.steps)
        elif optimizer.kind == "adagrad":
            change = self._adagrad(optimizer, positions, grads)
            scale = 1.0
        else:
            change = grads
            scale = 1.0
        self._rows.index_add_(0, positions, change, alpha=-lr * scale)

    def _adagrad(self, optimizer: RowOptimizer, positions: Tensor, grads: Tensor) -> Tensor:
        sums = self._state["sum"].index_add_(0, positions, grads * grads).index_select(0, positions)
        return grads / sums.sqrt_().add_(optimizer.eps)

    def _adam(
        self, optimizer: RowOptimizer, positions: Tensor, grads: Tensor, step: int
    ) -> tuple[Tensor, float]:
        """The direction, and the correction for averages that started from 0."""
        averages = []
        for name, new, beta in (
            ("exp_avg", grads, optimizer.betas[0]),
            ("exp_avg_sq", grads * grads, optimizer.betas[1]),
        ):
            old = self._state[name].index_select(0, positions)
            averages.append(old.add_((new - old).mul_(1 - beta)))
            self._state[name].index_copy_(0, positions, averages[-1])
        correction = math.sqrt(1 - optimizer.betas[1] ** step) / (1 - optimizer.betas[0] ** step)
        return averages[0] / averages[1].sqrt().add_(optimizer.eps), correction

    def state(self, chunk_rows: int = CHUNK_ROWS) -> Iterator[dict[str, Tensor]]:
        """All tensors that a checkpoint needs, besides `steps`, in chunks of copies.

        A chunk has "ids" [n], "rows" [n, dim], and one tensor [n, dim] per optimizer state. Rows
        that were never used are omitted: they follow from the spec of the table.
        """
        for start in range(0, self._used, chunk_rows):
            rows = slice(start, min(start + chunk_rows, self._used))
            tensors = {"ids": torch.from_numpy(self._ids), "rows": self._rows, **self._state}
            yield {name: tensor[rows].clone() for name, tensor in tensors.items()}

    def load_state(self, chunks: Iterable[Mapping[str, Tensor]], steps: int) -> None:
        """Replace all rows by saved ones, from any number of shards; skip rows of other shards.

        If a chunk does not fit, nothing is loaded.
        """
        if steps < 0:
            raise BadInput(f"{self.spec} cannot have been updated {steps} times")
        chunks = list(chunks)
        for chunk in chunks:
            check_chunk(self.spec, self.optimizer, chunk)
        self.clear()
        for chunk in chunks:
            self.load_chunk(chunk)
        self.steps = steps

    def load_chunk(self, chunk: Mapping[str, Tensor]) -> None:
        """Load the rows of this shard from a saved chunk."""
        check_chunk(self.spec, self.optimizer, chunk)
        ids = chunk["ids"]
        owners, _ = self.spec.locate(ids, self.shards)
        is_owned = torch.from_numpy(owners == self.shard)
        positions = self._positions(ids[is_owned])
        for name, tensor in {"rows": self._rows, **self._state}.items():
            tensor.index_copy_(0, positions, chunk[name][is_owned])

    def _positions(self, ids: Tensor) -> Tensor:
        """The positions of rows; rows that are used for the first time are initialized."""
        self.spec.check(ids)
        owners, slots = self.spec.locate(ids, self.shards)
        self._check_owners(owners, ids)
        positions = self._index[slots]
        if not positions.all():
            is_new = positions == 0
            self._initialize(ids.numpy()[is_new], slots[is_new])
            positions = self._index[slots]
        return torch.from_numpy(positions.astype(np.int64) - 1)

    def _initialize(self, ids: Ids, slots: Ids) -> None:
        ids, first = np.unique(ids, return_index=True)
        new_rows = slice(self._used, self._used + len(ids))
        self._ids[new_rows] = ids
        self._rows[new_rows] = self.spec.initial(torch.from_numpy(ids))
        for name, value in (self.optimizer.initial_state() if self.optimizer else {}).items():
            if value:
                self._state[name][new_rows] = value
        self._index[slots[first]] = np.arange(new_rows.start + 1, new_rows.stop + 1, dtype=np.int32)
        self._used = new_rows.stop

    def check(self, ids: Tensor, grads: Tensor) -> None:
        """Refuse ids of other shards, and gradients of another shape."""
        self.spec.check(ids)
        check_rows(self.spec, "gradients", ids, grads)
        self._check_owners(self.spec.locate(ids, self.shards)[0], ids)

    def _check_owners(self, owners: Ids, ids: Tensor) -> None:
        if (owners != self.shard).any():
            row = int(ids[int(np.argmax(owners != self.shard))])
            raise BadInput(
                f"row {row} of {self.spec} is not owned by shard {self.shard} of {self.shards}"
            )

    @torch.inference_mode(False)  # a table that is first used in inference mode can be trained
    def _reserve_rows(self) -> Tensor:
        return torch.from_numpy(self._reserve((self._capacity, self.spec.dim), np.float32))

    def _reserve(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """Zeros that take memory once they are written: the system allocates pages on demand."""
        try:
            return np.zeros(shape, dtype)
        except (MemoryError, ValueError) as error:
            raise BadInput(
                f"shard {self.shard} of {self.spec} does not fit: {self._capacity} rows of "
                f"{self.spec.dim} numbers; use more servers"
            ) from error


def check_chunk(
    spec: TableSpec, optimizer: RowOptimizer | None, chunk: Mapping[str, Tensor]
) -> None:
    """Refuse saved rows that do not fit a table with this optimizer."""
    wanted = {"ids", "rows", *(optimizer.initial_state() if optimizer is not None else ())}
    if set(chunk) != wanted:
        raise BadInput(
            f"{spec} keeps {', '.join(sorted(wanted))} of each row, and the saved chunk "
            f"has {', '.join(sorted(chunk))}: it was trained with another optimizer"
        )
    ids = chunk["ids"]
    spec.check(ids)
    if torch.unique(ids).numel() != ids.numel():
        raise BadInput(f"{spec} has one row for each id, and the saved chunk has several")
    for name in sorted(wanted - {"ids"}):
        check_rows(spec, name, ids, chunk[name])


def check_rows(spec: TableSpec, what: str, ids: Tensor, rows: Tensor) -> None:
    """Refuse what is not one row of numbers for each id."""
    shape = (ids.numel(), spec.dim)
    if rows.shape != shape or rows.dtype != torch.float32 or rows.device.type != "cpu":
        raise BadInput(
            f"{what} of {spec} must be {shape} of torch.float32 on the CPU, not "
            f"{tuple(rows.shape)} of {rows.dtype} on {rows.device}"
        )


def sum_duplicates(keys: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Unique keys in ascending order, and the sum of the rows of each, in the given order."""
    unique, inverse = torch.unique(keys, return_inverse=True)
    if torch.equal(unique, keys):
        return keys, rows
    return unique, rows.new_zeros(len(unique), rows.shape[1]).index_add_(0, inverse, rows)
