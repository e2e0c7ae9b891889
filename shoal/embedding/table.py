"""The rows of an embedding table that live on one shard.

    id ──shuffle──▶ owner (which shard), slot (which of its rows)
    index[slot] ──▶ place, given out in the order of first use
    rows[place], and beside it what the optimizer keeps

Memory for all rows is reserved and not used: a row costs memory from its first use on, and one
that was never used costs 4 bytes of index. It starts as a hash of seed, table and id says.
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


class Table:
    """One shard of a table. One thread at a time may use it.

    `pull` costs a gather, `push` a gather and a scatter for each tensor of the optimizer; both
    cost 4 hashes an id, and dim/2 hashes for each row that is used for the first time.
    """

    def __init__(self, spec: TableSpec, shard: int = 0, shards: int = 1):
        self.spec = spec
        self.shard = shard
        self.shards = shards
        self._room = spec.rows_of(shard, shards)
        if self._room > LARGEST_SHARD:
            raise BadInput(f"{spec} has too many rows for {shards} servers: take more of them")
        self.optimizer = spec.optimizer
        self.clear()

    def __len__(self) -> int:
        """Rows that have been used."""
        return self._used

    def clear(self) -> None:
        """All rows are as at the start again, and use no memory."""
        self._used = 0
        self._index = self._reserve((self._room,), np.int32)  # place + 1; 0 for no place yet
        self._ids = self._reserve((self._room,), np.int64)
        self._rows = self._reserve_rows()
        self.optimize(self.optimizer)

    def optimize(self, optimizer: RowOptimizer | None) -> None:
        """Train with this optimizer from now on; it starts without any memory of the past."""
        self.optimizer = optimizer
        self.steps = 0  # updates of the whole table, as far as this shard knows
        start = optimizer.initial_state() if optimizer is not None else {}
        self._state = {name: self._reserve_rows() for name in start}
        for name, value in start.items():
            if value:
                self._state[name][: self._used] = value

    @property
    def keys(self) -> tuple[str, ...]:
        """The tensors of a chunk beside its ids."""
        return ("rows", *self._state)

    def pull(self, ids: Tensor) -> Tensor:
        """Copies of rows, [n, dim]. Ids may repeat."""
        return self._rows.index_select(0, self._places(ids))

    def push(
        self, ids: Tensor, grads: Tensor, lr: float | None = None, step: int | None = None
    ) -> None:
        """One update of the rows `ids` by `grads`, [n, dim]; those of equal ids are added up.

        `lr` replaces the optimizer's own. `step` is the number of this update of the whole
        table, from 1 on, which Adam needs: a shard that none of its rows concerned does not see
        every update. Without it the shard counts for itself.
        """
        optimizer = self.optimizer
        if optimizer is None:
            raise BadInput(f"{self.spec} has no optimizer to train its rows with")
        lr = optimizer.lr if lr is None else lr
        if not math.isfinite(lr) or (step is not None and step < 1):
            raise BadInput(f"{self.spec} cannot be updated with lr={lr} as step {step}")
        self._check_rows("gradients", ids, grads)
        places, grads = add_up(self._places(ids), grads)
        self.steps = self.steps + 1 if step is None else max(self.steps, step)
        if optimizer.kind == "adam":
            change, scale = self._adam(optimizer, places, grads, step or self.steps)
        elif optimizer.kind == "adagrad":
            change = self._adagrad(optimizer, places, grads)
            scale = 1.0
        else:
            change = grads
            scale = 1.0
        self._rows.index_add_(0, places, change, alpha=-lr * scale)

    def _adagrad(self, optimizer: RowOptimizer, places: Tensor, grads: Tensor) -> Tensor:
        sums = self._state["sum"].index_add_(0, places, grads * grads).index_select(0, places)
        return grads / sums.sqrt_().add_(optimizer.eps)

    def _adam(
        self, optimizer: RowOptimizer, places: Tensor, grads: Tensor, step: int
    ) -> tuple[Tensor, float]:
        """The direction, and the correction for averages that started from 0."""
        averages = []
        for name, new, beta in (
            ("exp_avg", grads, optimizer.betas[0]),
            ("exp_avg_sq", grads * grads, optimizer.betas[1]),
        ):
            old = self._state[name].index_select(0, places)
            averages.append(old.add_((new - old).mul_(1 - beta)))
            self._state[name].index_copy_(0, places, averages[-1])
        correction = math.sqrt(1 - optimizer.betas[1] ** step) / (1 - optimizer.betas[0] ** step)
        return averages[0] / averages[1].sqrt().add_(optimizer.eps), correction

    def state(self, chunk_rows: int = CHUNK_ROWS) -> Iterator[dict[str, Tensor]]:
        """Everything that a checkpoint needs beside `steps`, in chunks of copies.

        A chunk has "ids" [n], "rows" [n, dim], and a tensor [n, dim] for each of the optimizer.
        Rows that were never used are left out: they follow from the table's value.
        """
        for start in range(0, self._used, chunk_rows):
            part = slice(start, min(start + chunk_rows, self._used))
            tensors = {"ids": torch.from_numpy(self._ids), "rows": self._rows, **self._state}
            yield {name: tensor[part].clone() for name, tensor in tensors.items()}

    def load_state(self, chunks: Iterable[Mapping[str, Tensor]], steps: int) -> None:
        """Be as the shards were that saved `chunks`, however many; rows of others are passed over.

        A chunk that does not fit is refused whole; those before it have been taken by then.
        """
        if steps < 0:
            raise BadInput(f"{self.spec} cannot have been updated {steps} times")
        self.clear()
        for chunk in chunks:
            self.load_chunk(chunk)
        self.steps = steps

    def load_chunk(self, chunk: Mapping[str, Tensor]) -> None:
        """Take over the rows of this shard from what was saved."""
        wanted = {"ids", "rows", *self._state}
        if set(chunk) != wanted:
            raise BadInput(
                f"{self.spec} keeps {', '.join(sorted(wanted))} of each row, and what was saved "
                f"has {', '.join(sorted(chunk))}: it was trained with another optimizer"
            )
        ids = chunk["ids"]
        self.spec.check(ids)
        for name in wanted - {"ids"}:
            self._check_rows(name, ids, chunk[name])
        owners, _ = self.spec.place(ids, self.shards)
        mine = torch.from_numpy(owners == self.shard)
        places = self._places(ids[mine])
        for name, tensor in {"rows": self._rows, **self._state}.items():
            tensor.index_copy_(0, places, chunk[name][mine])

    def _places(self, ids: Tensor) -> Tensor:
        """Where rows lie; those that are used for the first time are made."""
        self.spec.check(ids)
        owners, slots = self.spec.place(ids, self.shards)
        self._check_owners(owners, ids)
        places = self._index[slots]
        if not places.all():
            fresh = places == 0
            self._make(ids.numpy()[fresh], slots[fresh])
            places = self._index[slots]
        return torch.from_numpy(places.astype(np.int64) - 1)

    def _make(self, ids: Ids, slots: Ids) -> None:
        ids, first = np.unique(ids, return_index=True)
        part = slice(self._used, self._used + len(ids))
        self._ids[part] = ids
        self._rows[part] = self.spec.initial(torch.from_numpy(ids))
        for name, value in (self.optimizer.initial_state() if self.optimizer else {}).items():
            if value:
                self._state[name][part] = value
        self._index[slots[first]] = np.arange(part.start + 1, part.stop + 1, dtype=np.int32)
        self._used = part.stop

    def check(self, ids: Tensor, grads: Tensor) -> None:
        """Refuse ids that do not live here, and gradients that do not belong to them."""
        self.spec.check(ids)
        self._check_rows("gradients", ids, grads)
        self._check_owners(self.spec.place(ids, self.shards)[0], ids)

    def _check_owners(self, owners: Ids, ids: Tensor) -> None:
        if (owners != self.shard).any():
            stray = int(ids[int(np.argmax(owners != self.shard))])
            raise BadInput(
                f"row {stray} of {self.spec} does not live on shard {self.shard} of {self.shards}"
            )

    def _check_rows(self, what: str, ids: Tensor, rows: Tensor) -> None:
        shape = (ids.numel(), self.spec.dim)
        if rows.shape != shape or rows.dtype != torch.float32 or rows.device.type != "cpu":
            raise BadInput(
                f"{what} of {self.spec} are {shape} of torch.float32 on the CPU, not "
                f"{tuple(rows.shape)} of {rows.dtype} on {rows.device}"
            )

    @torch.inference_mode(False)  # else a table that is first used there could not be trained
    def _reserve_rows(self) -> Tensor:
        return torch.from_numpy(self._reserve((self._room, self.spec.dim), np.float32))

    def _reserve(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """Zeros that take memory where they are written: the system gives out pages on demand."""
        try:
            return np.zeros(shape, dtype)
        except (MemoryError, ValueError) as error:
            raise BadInput(
                f"shard {self.shard} of {self.spec} does not fit: {self._room} rows of "
                f"{self.spec.dim} numbers; take more servers"
            ) from error


def add_up(keys: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each key once, in ascending order, and the sum of its rows, added in the given order."""
    unique, inverse = torch.unique(keys, return_inverse=True)
    if torch.equal(unique, keys):
        return keys, rows
    return unique, rows.new_zeros(len(unique), rows.shape[1]).index_add_(0, inverse, rows)
