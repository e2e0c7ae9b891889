"""Data parallelism with compressed gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.comm.counting import Counting
from shoal.comm.group import Group
from shoal.sync.base import FIRST_BUCKET_BYTES, Replica, Sync
from shoal.sync.compressed_sum import (
    Exchange,
    Staged,
    complete,
    make_exchange,
    synchronize_copies,
)
from shoal.sync.traffic import StepTraffic


class CompressedReduce(Sync):
    """As `DdpSync`, with packed buckets. The head (loss and flags) travels as it is.

    A bucket is packed and on its way while backward still runs; its further stages follow in
    `finish`. The gradients of a step are those that arrived, the same bits on every replica.
    """

    def __init__(self, replica: Replica, bucket_bytes: int, compress: str):
        flat = replica.flat
        self.flat = flat
        self.update = replica.update
        self.counter = Counting(replica.group.executor)
        self.group = Group(self.counter)
        buckets = flat.buckets(bucket_bytes, min(bucket_bytes, FIRST_BUCKET_BYTES))
        flat.grads.watch(buckets)
        bodies = [self._body(bucket) for bucket in buckets]
        self.exchange: Exchange = make_exchange(compress, flat, self.group, bodies, replica.copies)
        self.traffic = StepTraffic(flat, self.counter)
        self._under_way: list[Staged] = []
        self._gaps = flat.gaps()
        self._copies = replica.copies

    def begin(self) -> None:
        self._under_way.clear()

    def reduce(self, bucket: slice) -> None:
        body = self._body(bucket)
        self._under_way.append(Staged(self.exchange.sum(self.flat.grads.buffer[body], body)))
        if bucket.start == 0:
            self._under_way.append(Staged(iter([self.group.all_reduce(self.flat.grads.header)])))

    def finish(self) -> None:
        complete(self._under_way)
        self.flat.grads.buffer[self._gaps] = 0.0  # unpacking leaves noise there, which would add up
        self.exchange.clear_unused()
        synchronize_copies(self.flat, self.flat.grads.buffer, self._copies)
        self.traffic.steps += 1
        self.flat.grads.publish()
        self.update.apply()
        self.flat.zero_grad()

    def loss(self, local_loss: Tensor) -> Tensor:
        return self.flat.grads.header[0].clone()

    def state(self) -> dict[str, Tensor]:
        """What each worker has still to send, and what the method carries from step to step."""
        with self.counter.uncounted():
            saved = self.exchange.state()
        return {f"gradients/{name}": tensor for name, tensor in saved.items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        prefix = "gradients/"
        self.exchange.load_state(
            {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        )
        self.exchange.clear_unused()

    def report(self) -> dict[str, Any]:
        return self.traffic.report()

    def summary(self) -> list[str]:
        return self.traffic.summary()

    def _body(self, bucket: slice) -> slice:
        """A bucket without the head."""
        return slice(max(bucket.start, self.flat.offset), bucket.stop)
