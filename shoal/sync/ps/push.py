"""How the gradients of one step go to the servers.

InPlacePush   gradients are collected in the client's push buffer: a bucket that is full is sent
StagedPush    gradients on a device: a bucket is copied to the push buffer first
ExactPush     exact=True: sums of micro-batches in a fixed order, sent at the end of the step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.replica.flat_params import FlatParams
from shoal.replica.ordered_sum import Node, add_leaf, full_subtrees, runs_of
from shoal.schedules.buffer_layout import PUSH_BUCKET_BYTES
from shoal.server.client import Client


class GradientPush:
    """What all ways to push share. Chosen once, when the worker is built."""

    every_microbatch = False  # whether buckets are reported after each micro-batch
    has_state = False  # whether a checkpoint has to hold something of each worker
    reduce: Callable[[slice], None]
    """The gradients of this bucket are final on this worker; backward may still run."""

    def __init__(self, flat: FlatParams, client: Client):
        self.flat = flat
        self.client = client

    def begin(self) -> None:
        """A step begins."""
        return None

    def finish(self) -> Tensor:
        """All buckets have been reported; returns the headers of the sums that were pushed."""
        return self.flat.grads.header.detach().cpu().clone()[None]

    def withdraw(self) -> None:
        """The push was dropped as late."""
        return None

    def deposit(self) -> None:
        """Give the state of this worker to the servers, for the worker that saves."""
        return None

    def collect(self) -> dict[str, Tensor]:
        """The state that all live workers have deposited."""
        return {}

    def check_state(self, tensors: dict[str, Tensor]) -> None:
        """Raise CheckpointError for what `load_state` could not take."""
        return None

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        return None

    def report(self) -> dict[str, Any]:
        return {}

    def summary(self) -> list[str]:
        return []


class InPlacePush(GradientPush):
    """Copies nothing: in shared memory the servers read where backward has written."""

    def __init__(self, flat: FlatParams, client: Client):
        super().__init__(flat, client)
        flat.grads.watch(flat.buckets(PUSH_BUCKET_BYTES), memory=client.out[0])
        self.reduce = client.push


class StagedPush(GradientPush):
    def __init__(self, flat: FlatParams, client: Client):
        super().__init__(flat, client)
        flat.grads.watch(flat.buckets(PUSH_BUCKET_BYTES))

    def reduce(self, bucket: slice) -> None:
        self.client.out[0, bucket].copy_(self.flat.grads.buffer[bucket])
        self.client.push(bucket)


class ExactPush(GradientPush):
    """Sums the gradients of micro-batches in the order of a tree; pushes complete subtrees."""

    every_microbatch = True

    def __init__(self, flat: FlatParams, client: Client, microbatches: int):
        super().__init__(flat, client)
        flat.grads.watch(flat.buckets(PUSH_BUCKET_BYTES))
        workers = client.specs[0].rule.workers
        self._root = (0, microbatches)
        self._run = runs_of(microbatches, workers)[client.rank]
        self._subtrees = full_subtrees(self._root, self._run)

    def begin(self) -> None:
        self._sums: dict[int, dict[Node, Tensor]] = {}
        self._headers: dict[Node, Tensor] = {}

    def reduce(self, bucket: slice) -> None:
        sums = self._sums.setdefault(bucket.start, {})
        add_leaf(self._root, self._run[0], sums, self.flat.grads.buffer[bucket])
        if bucket.start == 0:
            add_leaf(self._root, self._run[0], self._headers, self.flat.grads.header)

    def finish(self) -> Tensor:
        grads = self.flat.grads
        out = self.client.out
        headers = torch.zeros(len(out), self.flat.header_size, dtype=grads.header.dtype)
        for i, node in enumerate(self._subtrees):
            for bucket in grads.buckets:
                out[i, bucket].copy_(self._sums[bucket.start][node])
            headers[i].copy_(self._headers[node])
        self.client.push(slice(0, self.flat.size))
        return headers
