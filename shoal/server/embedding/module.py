"""`shoal.Embedding`: an embedding whose rows live in a store, not in the model.

    forward       ids ─unique─▶ pull each row once ─▶ a leaf of the graph ─▶ gather
    backward      keeps the gradient of that leaf, already summed over equal ids
    end of step   sums the gradients of all calls and micro-batches, and pushes them once

The default store is a table in this process. The job may bind another, such as one on servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from shoal.errors import BadInput
from shoal.server.embedding.chunks import fit_chunks
from shoal.server.embedding.spec import UNNAMED, Init, Placement, RowOptimizer, TableSpec
from shoal.server.embedding.table import RowTable, sum_duplicates


class EmbeddingTable(Protocol):
    """Rows by id. Ids are int64 and rows float32, both on the CPU."""

    steps: int  # updates by all workers, as of the latest `state`

    def pull(self, ids: Tensor) -> Tensor:
        """Copies of rows, [n, dim]."""

    def push(self, ids: Tensor, grads: Tensor, lr: float, step: int) -> None:
        """Update number `step` of the table, from 1 on: these rows by these gradients."""

    def state(self) -> Iterator[dict[str, Tensor]]:
        """All rows that have been used, and their optimizer state: see `RowTable.state`."""

    def load_state(self, chunks: Iterable[dict[str, Tensor]], steps: int) -> None:
        """Replace all rows by saved ones: see `RowTable.load_state`."""


class RowStore(Protocol):
    def create(self, spec: TableSpec) -> EmbeddingTable:
        """A table, before its first use; the present one if the same table exists."""


class LocalStore(RowStore):
    """The table of one embedding, in this process."""

    table: RowTable | None = None

    def create(self, spec: TableSpec) -> EmbeddingTable:
        if self.table is None:
            self.table = RowTable(spec)
        elif self.table.optimizer != spec.optimizer:
            self.table.set_optimizer(spec.optimizer)
        return self.table


RowGradients = tuple[Tensor, Tensor]  # unique ids [n], and their gradients [n, dim]


class RowOptions(TypedDict, total=False):
    """Where rows live, and how long."""

    placement: Placement
    min_count: int
    ttl_steps: int | None
    hot_share: float
    cache_steps: int


class Embedding(nn.Module):
    """A replacement for `nn.Embedding(num_rows, dim)`: maps ids of any shape to rows, [*, dim].

    The rows are not parameters of the model: a worker holds only those of its batch. They are
    trained by `optimizer`, a `functools.partial` of torch.optim.SGD (without momentum), Adagrad,
    Adam or SparseAdam (default: the optimizer of the job, if it is one of these). Only rows of
    the batch change, as with `nn.Embedding(sparse=True)`.

    A row is initialized from N(0, scale²) (`init="normal"`), uniformly from -scale to scale, or
    with zeros. It depends on the seed of the job, the name of the table and the id, not on the
    process that holds it. The row of `padding_idx` stays 0. `name` is the name of the table
    (default: that of the module in the model).

    `min_count=k`: a row is trained from the k-th step that sees it. `ttl_steps=t`: a row that t
    steps in a row do not see leaves. On servers, `placement` spreads rows by a "hash" of their
    ids, or gives each server a "range" of them; rows over the share `hot_share` of all pulls are
    copied to all servers; workers may use a pulled row again for `cache_steps` steps.
    """

    has_rows = True  # how training finds it without loading this module

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
        **options: Unpack[RowOptions],
    ):
        super().__init__()
        # checked where the script creates it; name and seed may still change
        self.spec = TableSpec(
            name or UNNAMED,
            num_rows,
            dim,
            init,
            scale,
            torch.initial_seed(),
            None if optimizer is None else RowOptimizer.of(optimizer),
            **options,
        )
        if padding_idx is not None and not -num_rows <= padding_idx < num_rows:
            raise BadInput(f"padding_idx={padding_idx} is out of range for {num_rows} rows")
        self.padding_idx = None if padding_idx is None else padding_idx % num_rows
        self.name = name
        self.has_own_optimizer = optimizer is not None
        self.store: RowStore | None = None
        self.table: EmbeddingTable | None = None
        self.updates = 0  # with the present optimizer
        self.trained = False  # with any optimizer
        self._kept: list[RowGradients] = []

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
        """Use the table `spec` of `store` from now on."""
        if self.trained and store is not self.store:
            raise BadInput(
                f"the rows of {self.spec} have been trained already and cannot move to another "
                "store: create a new shoal.Embedding"
            )
        self.table = store.create(spec)
        if spec.optimizer != self.spec.optimizer:
            self.updates = 0
        self.store = store
        self.spec = spec
        self.discard()

    def forward(self, ids: Tensor) -> Tensor:
        if ids.dtype not in (torch.int64, torch.int32):
            raise BadInput(f"ids of {self.spec} must be int64 or int32, not {ids.dtype}")
        if isinstance(ids, FakeTensor):  # a trace, which knows sizes alone
            return torch.zeros(*ids.shape, self.dim).requires_grad_(torch.is_grad_enabled())
        unique, inverse = torch.unique(ids.long(), return_inverse=True)
        rows = self._pull(unique.cpu()).to(ids.device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(self._keep(unique))  # type: ignore[no-untyped-call]
        return F.embedding(inverse, rows)

    def take_gradients(self) -> RowGradients | None:
        """Gradients since the last call, on the CPU; None if there was no backward.

        Ids are unique and in ascending order; their gradients are sums.
        """
        if not self._kept:
            return None
        kept = self._kept
        self._kept = []
        ids, grads = kept[0]
        if len(kept) > 1:
            all_ids = torch.cat([kept_ids for kept_ids, _ in kept])
            ids, grads = sum_duplicates(all_ids, torch.cat([kept_grads for _, kept_grads in kept]))
        if self.padding_idx is not None:
            is_trained = ids != self.padding_idx
            ids = ids[is_trained]
            grads = grads[is_trained]
        return ids.cpu(), grads.cpu()

    def discard(self) -> None:
        """Drop the gradients that backward has left."""
        self._kept = []

    def apply_gradients(self, lr: float | None = None) -> None:
        """Push the gradients that backward has left, as one update of the table."""
        gradients = self.take_gradients()
        if gradients is None:
            return
        if self.spec.optimizer is None:
            raise BadInput(f"{self.spec} has no optimizer: pass one to shoal.Embedding")
        self.updates += 1
        self.trained = True
        ids, grads = gradients
        lr = self.spec.optimizer.lr if lr is None else lr
        self._bound().push(ids, grads, lr, self.updates)

    def state(self) -> dict[str, Tensor]:
        """All rows that have been used. A checkpoint needs these and `stored_updates`."""
        by_name: dict[str, list[Tensor]] = {}
        for chunk in self._bound().state():
            for name, tensor in chunk.items():
                by_name.setdefault(name, []).append(tensor)
        return {name: torch.cat(tensors) for name, tensors in by_name.items()}

    @property
    def stored_updates(self) -> int:
        """Updates of the rows that `state` has returned last.

        Where workers push at their own pace these are more than the `updates` of this one.
        """
        return max(self.updates, self._bound().steps)

    def check_state(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Raise BadInput for what `load_state` could not take; nothing is changed."""
        fit_chunks(self.spec, self.spec.optimizer, tensors, updates)

    def load_state(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Continue from a checkpoint, whichever store it was saved from."""
        self._bound().load_state([tensors] if tensors else [], updates)
        self.updates = updates
        self.trained = True
        self.discard()

    def _bound(self) -> EmbeddingTable:
        if self.table is None:
            self.bind(LocalStore(), self.spec)
        assert self.table is not None
        return self.table

    def _pull(self, ids: Tensor) -> Tensor:
        self.spec.check(ids)
        table = self._bound()
        if not ids.numel():
            return torch.zeros(0, self.dim)
        rows = table.pull(ids)
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
    """All shoal.Embedding of a model, each once, with the name of its table."""
    embeddings = [
        (module.name or path or UNNAMED, module)
        for path, module in model.named_modules()
        if isinstance(module, Embedding)
    ]
    for name, count in Counter(name for name, _ in embeddings).items():
        if count > 1:
            raise BadInput(f"two embeddings of the model have the name {name!r}: rename one")
    return embeddings


def bind_embeddings(
    model: nn.Module, optimizer: Any, seed: int, store: RowStore | None = None
) -> list[Embedding]:
    """Bind the embeddings of a model to `store` (default: a local store each); returns them.

    Embeddings without an optimizer take `optimizer`, the factory of the job. An embedding that
    was trained in this process before keeps its rows.
    """
    embeddings = embeddings_of(model)
    for name, embedding in embeddings:
        row_optimizer = embedding.spec.optimizer if embedding.has_own_optimizer else None
        spec = replace(embedding.spec, optimizer=row_optimizer or RowOptimizer.of(optimizer))
        if embedding.trained:
            embedding.bind(store or embedding.store or LocalStore(), spec)
        else:
            embedding.bind(store or LocalStore(), replace(spec, name=name, seed=seed))
    return [embedding for _, embedding in embeddings]


def apply_embeddings(
    embeddings: Iterable[Embedding], lr: float | None = None, base_lr: float | None = None
) -> None:
    """End a step: push the gradients that backward has left, one per row.

    `lr` is the learning rate of this step. `base_lr` is the one that the model's optimizer was
    created with: a table keeps its ratio to it, as parameter groups do.
    """
    for embedding in embeddings:
        optimizer = embedding.spec.optimizer
        if lr is None or optimizer is None:
            embedding.apply_gradients()
        else:
            embedding.apply_gradients(lr * optimizer.lr / base_lr if base_lr else lr)
