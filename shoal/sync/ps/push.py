"""How the gradients of one step go to the servers.

InPlacePush     gradients are collected in the client's push buffer: a bucket that is full is sent;
                over connections large ones stay where backward has put them
StagedPush      gradients on a device: a bucket is copied to the push buffer first
ExactPush       exact=True: sums of micro-batches in a fixed order, sent at the end of the step
CompressedPush  the slice of a server is compressed when the last of its gradients is final, so
                later slices are sent while backward still runs. Weights (or sums) are pulled
                uncompressed: they are the same for all workers, whichever are late or lost

And where the optimizer runs, which is what a pull brings:

UpdateOnServers ps(update="server"): weights, which are copied into the model
UpdateInPlace   the same; the model lies in the memory that servers write to
UpdateOnWorkers ps(update="worker"): the sum of the gradients, for the optimizer of each worker
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.replica.flat_params import FlatParams
from shoal.replica.ordered_sum import add_leaf
from shoal.replica.split.shard import ReplicaShard
from shoal.runtime.trace import WAIT
from shoal.schedules.addition_tree import Node, full_subtrees, runs_of
from shoal.schedules.buffer_layout import LARGE_BYTES, PUSH_BUCKET_BYTES
from shoal.server.client.client import Client, PullResult
from shoal.server.client.route import Request
from shoal.server.messages import SavedResidual
from shoal.server.model.compression import PushCompression
from shoal.server.protocol import FrameKind, decode
from shoal.server.shared_memory import Tell, bytes_of
from shoal.sync import compressed_sum, under
from shoal.sync.optimizer_step import OptimizerStep


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

    def finish(self) -> Tensor:
        """All buckets have been reported; returns the headers of the sums that were pushed."""
        return self.flat.grads.header.detach().cpu().clone()[None]

    def withdraw(self) -> None:
        """The push was dropped as late."""

    def deposit(self) -> None:
        """Give the state of this worker to the servers, for the worker that saves."""

    def collect(self) -> dict[str, Tensor]:
        """The state that all live workers have deposited."""
        return {}

    def check_state(self, tensors: dict[str, Tensor]) -> None:
        """Raise CheckpointError for what `load_state` could not take."""

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        return None

    def summary(self) -> list[str]:
        return []


class InPlacePush(GradientPush):
    """In shared memory the servers read the buffer that gradients are collected in.

    Over connections large gradients are sent from where backward has put them.
    """

    def __init__(self, flat: FlatParams, client: Client, may_stay: bool):
        """`may_stay`: the buffer gets no sums of gradients."""
        super().__init__(flat, client)
        is_shared = client.on_device is not None or any(x.shares_memory for x in client.links)
        large_bytes = LARGE_BYTES if may_stay and not is_shared else None
        flat.grads.watch(flat.buckets(PUSH_BUCKET_BYTES), large_bytes, client.out[0])
        runs = iter(flat.grads.runs())
        tensors = flat.grads.tensors
        self._runs = {
            at: [run for _, run in zip(tensors[at], runs, strict=False)] for at in tensors
        }
        self.reduce = client.push if large_bytes is None else self._push

    def _push(self, bucket: slice) -> None:
        tensors = self.flat.grads.tensors[bucket.start]
        for run, gradients in zip(self._runs[bucket.start], tensors, strict=False):
            self.client.push(run, gradients)


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


PREFIX = "gradients/"


class CompressedPush(GradientPush):
    """`residual` is what compression has lost so far; it is added to the next push."""

    memory_column: ClassVar[str] = "residuals"
    has_state = True

    def __init__(self, flat: FlatParams, client: Client, copies: ReplicaShard | None = None):
        super().__init__(flat, client)
        flat.grads.watch(flat.buckets(PUSH_BUCKET_BYTES))
        self.packings = [PushCompression(spec) for spec in client.specs]
        dtype = self.packings[0].residual_dtype
        self.residual = torch.zeros(flat.size, dtype=dtype, device=flat.device)
        self.pushes = 0
        self.pushed_bytes = 0
        self._gaps = flat.gaps()
        self._unused = compressed_sum.unused_positions(flat, copies)
        rule = client.specs[0].rule
        may_be_dropped = rule.quorum is not None and not rule.fold
        self._residual_before = self.residual.clone() if may_be_dropped else None

    def reduce(self, bucket: slice) -> None:
        """Buckets run from the end to the start: a slice that starts in this one is complete."""
        for index, spec in enumerate(self.client.specs):
            if self.packings[index].num_bytes and bucket.start <= spec.start < bucket.stop:
                self._push_slice(index)
        if bucket.start == 0:
            self.pushes += 1

    def withdraw(self) -> None:
        """The gradient of this step is lost; the residual of earlier steps is not."""
        if self._residual_before is not None:
            self.residual.copy_(self._residual_before)

    def _push_slice(self, index: int) -> None:
        elements = self._slice(index)
        gradients = self.flat.grads.buffer
        gradients[self._gaps] = 0.0  # a sum that was pulled has left noise there
        if self._residual_before is not None:
            self._residual_before[elements] = self.residual[elements]
        packing = self.packings[index]
        packed = packing.pack(gradients[elements], self.residual[elements])
        self.residual[self._unused] = 0.0  # not needed, and not in a checkpoint
        self.pushed_bytes += packed.nbytes
        request = Request(
            FrameKind.COMPRESSED,
            payload=(bytes_of(packed),),
            sequence=self.client.sequence + 1,
            is_answered=False,
        )
        self.client.links[index].post("push", request)

    def _slice(self, index: int) -> slice:
        spec = self.client.specs[index]
        return slice(spec.start, spec.stop)

    # ------------------------------------------------------------------ checkpoints

    def deposit(self) -> None:
        replies = []
        for index, packing in enumerate(self.packings):
            tensors = [self.residual[self._slice(index)].cpu(), packing.basis.cpu()]
            request = Request(FrameKind.RESIDUAL_SET, payload=tuple(map(bytes_of, tensors)))
            replies.append(self.client.links[index].post("push", request))
        for reply in replies:
            reply.result()

    def collect(self) -> dict[str, Tensor]:
        saved: dict[str, Tensor] = {}
        for worker in range(self.client.specs[0].rule.workers):
            saved |= self._state_of(worker)
        return {f"{PREFIX}{name}": tensor for name, tensor in saved.items()}

    def check_state(self, tensors: dict[str, Tensor]) -> None:
        saved = under(PREFIX, tensors)
        compressed_sum.check_residuals(saved, self.residual)

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take this worker's residual back; another number of workers divides the sum equally."""
        saved = under(PREFIX, tensors)
        rank = self.client.rank
        compressed_sum.take_residual(saved, self.residual, rank, self.client.specs[0].rule.workers)
        self.residual[self._unused] = 0.0
        for index, packing in enumerate(self.packings):
            basis = saved.get(f"worker/{rank}/basis/{index}")
            if basis is not None and compressed_sum.is_alike(basis, packing.basis):
                packing.basis = basis.to(self.flat.device)

    def _state_of(self, worker: int) -> dict[str, Tensor]:
        """What a worker has deposited with the servers; empty if it was lost."""
        residual = torch.zeros(self.flat.size, dtype=self.residual.dtype)
        bases = {}
        for index, packing in enumerate(self.packings):
            basis = torch.empty_like(packing.basis, device="cpu")
            into = (bytes_of(residual[self._slice(index)]), bytes_of(basis))
            request = Request(FrameKind.RESIDUAL_GET, into=into, argument=worker)
            reply = self.client.links[index].post("pull", request).result()
            if not decode(reply.meta, SavedResidual).is_saved:
                return {}
            if basis.numel():
                bases[f"worker/{worker}/basis/{index}"] = basis
        return {f"worker/{worker}/residual": residual, **bases}

    # ------------------------------------------------------------------ the end of a run

    def summary(self) -> list[str]:
        if not self.pushed_bytes:
            return []
        num_bytes = self.pushed_bytes / self.pushes
        size = sum(spec.stop - spec.start for spec in self.client.specs)
        plain_bytes = size * self.flat.data.element_size()
        return [
            f"each worker pushed {num_bytes:,.0f} bytes a step, which are {plain_bytes:,} in full: "
            f"{plain_bytes / num_bytes:.1f} times less"
        ]


@dataclass(eq=False)
class UpdateOnServers:
    """Chosen once, when the worker is built, as its subclasses are.

    `copies` are parameters of which the servers of several shards hold one each.
    """

    flat: FlatParams
    update: OptimizerStep
    client: Client
    copies: ReplicaShard | None = None

    @property
    def served_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose state the servers keep."""
        return self.update.optimizer

    def learning_rate(self, step: int) -> float | None:
        """What the servers update with in this step; None: as before."""
        return self.update.learning_rate(step)

    def take(self, result: PullResult) -> None:
        """Use what a pull has brought."""
        with self.update.tracer.span(WAIT, f"copy weights of version {result.version}"):
            params = slice(self.flat.offset, self.flat.size)
            self.flat.data[params].copy_(self.client.inbox[params])
            compressed_sum.synchronize_copies(self.flat, self.flat.data, self.copies)
        self.flat.zero_grad()

    def finish_step(self) -> None:
        """The step was pushed."""
        self.update.steps += 1


class UpdateInPlace(UpdateOnServers):
    """Servers write only while this worker waits for them. On one host all workers share memory."""

    def __init__(self, flat: FlatParams, update: OptimizerStep, client: Client, tell: Tell):
        super().__init__(flat, update, client)
        is_shared = client.share_weights(tell)
        flat.move_to(client.inbox, copy=not is_shared or client.rank == 0)

    def take(self, result: PullResult) -> None:
        self.flat.zero_grad()


class UpdateOnWorkers(UpdateOnServers):
    @property
    def served_optimizer(self) -> None:
        return None

    def learning_rate(self, step: int) -> None:
        return None

    def take(self, result: PullResult) -> None:
        grads = self.flat.grads
        with self.update.tracer.span(WAIT, f"copy gradients of version {result.version}"):
            params = slice(self.flat.offset, self.flat.size)
            grads.buffer[params].copy_(self.client.inbox[params])
            compressed_sum.synchronize_copies(self.flat, grads.buffer, self.copies)
        grads.header.copy_(result.loss_flags)
        grads.publish()

    def finish_step(self) -> None:
        self.update.apply()
        self.flat.zero_grad()
