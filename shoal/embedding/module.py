"""`shoal.Embedding`: an embedding whose rows live in a store, not in the model.

    forward    ids ─unique─▶ pull the rows, once each ─▶ a leaf of the graph ─▶ gather
    backward   the gradient of that leaf, equal ids already added up, is kept
    the end    of the step: what is kept is added up over calls and micro-batches, and pushed

The store is a table in this process unless the job binds another, such as one on servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.embedding.spec import Init, RowOptimizer, TableSpec
from shoal.embedding.table import Table, add_up
from shoal.errors import BadInput

Rows = tuple[Tensor, Tensor]  # ids [n], each once, and what belongs to them [n, dim]


class RowStore(Protocol):
    """Where rows live. Ids are int64 and rows float32, both on the CPU."""

    def create(self, spec: TableSpec) -> None:
        """Make a table known before its first use; harmless when it is already."""
        ...

    def pull(self, table: str, ids: Tensor) -> Tensor:
        """Copies of rows, [n, dim]."""
        ...

    def push(self, table: str, ids: Tensor, grads: Tensor, lr: float, step: int) -> None:
        """Update number `step` of the table, from 1 on: these rows by these gradients."""
        ...

    def state(self, table: str) -> Iterator[dict[str, Tensor]]:
        """All rows that have been used, and what the optimizer keeps: see `Table.state`."""
        ...

    def load_state(self, table: str, chunks: Iterable[dict[str, Tensor]], steps: int) -> None:
        """Be as saved: see `Table.load_state`."""
        ...


class LocalStore:
    """Tables in this process."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}

    def create(self, spec: TableSpec) -> None:
        table = self.tables.get(spec.name)
        if table is None:
            self.tables[spec.name] = Table(spec)
        elif replace(table.spec, optimizer=spec.optimizer) != spec:
            raise BadInput(f"there is another {spec} already, of other rows: rename one")
        elif table.optimizer != spec.optimizer:
            table.optimize(spec.optimizer)

    def pull(self, table: str, ids: Tensor) -> Tensor:
        return self.tables[table].pull(ids)

    def push(self, table: str, ids: Tensor, grads: Tensor, lr: float, step: int) -> None:
        self.tables[table].push(ids, grads, lr, step)

    def state(self, table: str) -> Iterator[dict[str, Tensor]]:
        return self.tables[table].state()

    def load_state(self, table: str, chunks: Iterable[dict[str, Tensor]], steps: int) -> None:
        self.tables[table].load_state(chunks, steps)


class Embedding(nn.Module):
    """Takes the place of `nn.Embedding(num_rows, dim)`: ids of any shape to rows, [*, dim].

    The rows are no parameters of the model: a worker holds those of its batch. They are trained
    by `optimizer`, a `functools.partial` of torch.optim.SGD (without momentum), Adagrad, Adam or
    SparseAdam; or by that of the job, if it is one of these. Only rows of the batch change, as
    with `nn.Embedding(sparse=True)`.

    A row starts as N(0, scale²) (`init="normal"`), uniform from -scale to scale, or as zeros; it
    depends on the job's seed, the table's name and the id, not on who holds it. The row of
    `padding_idx` is 0 and stays so. `name` is that of the module in the model unless told.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        padding_idx: int | None = None,
        *,
        init: Init = "normal",
        scale: float = 1.0,
        optimizer: Any = None,
        name: str | None = None,
    ):
        super().__init__()
        # checked here, where the script can see it; name and seed may still change
        self.spec = TableSpec(
            name or "embedding",
            num_rows,
            dim,
            init,
            scale,
            torch.initial_seed(),
            None if optimizer is None else RowOptimizer.of(optimizer),
        )
        if padding_idx is not None and not -num_rows <= padding_idx < num_rows:
            raise BadInput(f"padding_idx={padding_idx} is no row of an embedding of {num_rows}")
        self.padding_idx = None if padding_idx is None else padding_idx % num_rows
        self.name = name
        self.has_own_optimizer = optimizer is not None
        self.store: RowStore | None = None
        self.updates, self.trained = 0, False  # updates by this optimizer; by any
        self._kept: list[Rows] = []

    @property
    def num_rows(self) -> int:
        return self.spec.num_rows

    @property
    def dim(self) -> int:
        return self.spec.dim

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_rows}, {self.dim}{padding}"

    def bind(self, store: RowStore, spec: TableSpec) -> None:
        """Take rows from `store` from now on, as the table that `spec` says."""
        if self.trained and store is not self.store:
            raise BadInput(
                f"the rows of {self.spec} have been trained already and cannot move to another "
                "store: make a new shoal.Embedding"
            )
        store.create(spec)
        if spec.optimizer != self.spec.optimizer:
            self.updates = 0
        self.store = store
        self.spec = spec
        self.discard()

    def forward(self, ids: Tensor) -> Tensor:
        if ids.dtype not in (torch.int64, torch.int32):
            raise BadInput(f"ids of {self.spec} are whole numbers, not {ids.dtype}")
        unique, inverse = torch.unique(ids.long(), return_inverse=True)
        rows = self._pull(unique.cpu()).to(ids.device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(self._keep(unique))  # type: ignore[no-untyped-call]
        return F.embedding(inverse, rows)

    def take_gradients(self) -> Rows | None:
        """What has been kept since the last time, on the CPU; None if no backward came by.

        Ids are in ascending order, each once; their gradients are sums.
        """
        if not self._kept:
            return None
        kept = self._kept
        self._kept = []
        ids, grads = kept[0]
        if len(kept) > 1:
            ids, grads = add_up(torch.cat([i for i, _ in kept]), torch.cat([g for _, g in kept]))
        if self.padding_idx is not None:
            real = ids != self.padding_idx
            ids = ids[real]
            grads = grads[real]
        return ids.cpu(), grads.cpu()

    def discard(self) -> None:
        """Forget what has been kept."""
        self._kept = []

    def apply_gradients(self, lr: float | None = None) -> None:
        """Push what has been kept as one update of the table."""
        found = self.take_gradients()
        if found is None:
            return
        if self.spec.optimizer is None:
            raise BadInput(f"{self.spec} has no optimizer: pass one to shoal.Embedding")
        self.updates = self.updates + 1
        self.trained = True
        self._bound().push(
            self.spec.name, *found, self.spec.optimizer.lr if lr is None else lr, self.updates
        )

    def state(self) -> dict[str, Tensor]:
        """All rows that have been used, for a checkpoint; with `updates` it is all there is."""
        chunks = list(self._bound().state(self.spec.name))
        names = chunks[0] if chunks else ()
        return {name: torch.cat([chunk[name] for chunk in chunks]) for name in names}

    def load_state(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Go on from what was saved, wherever the rows lived then."""
        self._bound().load_state(self.spec.name, [tensors] if tensors else [], updates)
        self.updates = updates
        self.trained = True
        self.discard()

    def _bound(self) -> RowStore:
        if self.store is None:
            self.bind(LocalStore(), self.spec)
        assert self.store is not None
        return self.store

    def _pull(self, ids: Tensor) -> Tensor:
        self.spec.check(ids)
        store = self._bound()
        if not ids.numel():
            return torch.zeros(0, self.dim)
        rows = store.pull(self.spec.name, ids)
        if self.padding_idx is not None:
            rows[ids == self.padding_idx] = 0
        return rows

    def _keep(self, ids: Tensor) -> Callable[[Tensor], None]:
        def keep(rows: Tensor) -> None:
            assert rows.grad is not None
            self._kept.append((ids, rows.grad))
            rows.grad = None

        return keep


def embeddings_of(model: nn.Module) -> list[tuple[str, Embedding]]:
    """All shoal.Embedding of a model, each once, by the name of its table."""
    found = [
        (e.name or path or "embedding", e)
        for path, e in model.named_modules()
        if isinstance(e, Embedding)
    ]
    names = [name for name, _ in found]
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"two embeddings of the model have the name {name!r}: rename one")
    return found


def bind_embeddings(
    model: nn.Module, optimizer: Any, seed: int, store: RowStore | None = None
) -> list[Embedding]:
    """Bind the embeddings of a model to `store`, or each to itself; returns them.

    Those without an optimizer of their own take `optimizer`, the factory of the job. One that was
    trained here before keeps its rows.
    """
    found = embeddings_of(model)
    for name, embedding in found:
        own = embedding.spec.optimizer if embedding.has_own_optimizer else None
        spec = replace(embedding.spec, optimizer=own or RowOptimizer.of(optimizer))
        if embedding.trained:
            embedding.bind(store or embedding.store or LocalStore(), spec)
        else:
            embedding.bind(store or LocalStore(), replace(spec, name=name, seed=seed))
    return [embedding for _, embedding in found]


def apply_embeddings(
    embeddings: Iterable[Embedding], lr: float | None = None, base_lr: float | None = None
) -> None:
    """End a step: push what backward has left, once a row.

    `lr` is the learning rate of this step, and `base_lr` the one that the model's optimizer was
    made with: a table keeps its ratio to it, as parameter groups do.
    """
    for embedding in embeddings:
        optimizer = embedding.spec.optimizer
        if lr is None or optimizer is None:
            embedding.apply_gradients()
        else:
            embedding.apply_gradients(lr * optimizer.lr / base_lr if base_lr else lr)
