"""Data parallelism with compressed gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from shoal.replica.flat.layout import FlatLayout
from shoal.schedules.buffer_layout import FIRST_BUCKET_BYTES
from shoal.sync.base import Replica, Sync, under
from shoal.sync.memory import ModelSizes, SyncMemory
from shoal.sync.traffic import StepTraffic
from shoal.transport.transport import Work


class CompressedReduce(Sync):
    """As `DdpSync`, with packed buckets. The header (loss and flags) travels as it is."""

    def __init__(self, replica: Replica, bucket_bytes: int, compress: str):
        from shoal.sync.compressed_sum import make_compressed_sum

        flat = replica.flat
        self.flat = flat
        self.update = replica.update
        self.traffic = StepTraffic()
        self.group = self.traffic.count(flat, replica.group)
        buckets = ddp_buckets(flat, bucket_bytes)
        flat.grads.watch(buckets)
        bodies = [without_header(flat, bucket) for bucket in buckets]
        self.sums = make_compressed_sum(compress, flat, self.group, bodies, replica.copies)
        self._header: Work | None = None
        self._gaps = flat.gaps()
        self._copies = replica.copies

    def begin(self) -> None:
        self.sums.under_way.clear()

    def reduce(self, bucket: slice) -> None:
        body = without_header(self.flat, bucket)
        self.sums.start(self.flat.grads.buffer[body], body)
        if bucket.start == 0:
            self._header = self.group.all_reduce(self.flat.grads.header)

    def collect(self) -> None:
        from shoal.sync.residuals import synchronize_copies

        self.sums.finish()
        if self._header is not None:
            self._header.wait()
        self.flat.grads.buffer[self._gaps] = 0.0  # unpacking leaves noise there, which would add up
        self.sums.clear_unused()
        synchronize_copies(self.flat, self.flat.grads.buffer, self._copies)
        self.traffic.steps += 1
        self.flat.grads.publish()

    def loss(self, local_loss: Tensor) -> Tensor:
        return self.flat.grads.header[0].clone()

    def state(self) -> dict[str, Tensor]:
        """What each worker has still to send, and what the method carries from step to step."""
        with self.traffic.uncounted():
            saved = self.sums.state()
        return {f"gradients/{name}": tensor for name, tensor in saved.items()}

    def check_state(self, tensors: dict[str, Tensor]) -> None:
        self.sums.check_state(under("gradients/", tensors))

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self.sums.load_state(under("gradients/", tensors))
        self.sums.clear_unused()

    def report(self) -> dict[str, Any]:
        return self.traffic.report()

    def summary(self) -> list[str]:
        return self.traffic.summary()


def ddp_buckets(layout: FlatLayout, bucket_bytes: int) -> list[slice]:
    """The buckets of a step; the one that is full first is small."""
    return layout.buckets(bucket_bytes, min(bucket_bytes, FIRST_BUCKET_BYTES))


def compressed_ddp_memory(
    compress: str,
    memory: SyncMemory,
    sizes: ModelSizes,
    buckets: Sequence[slice],
    rank: int,
    replicas: int,
) -> SyncMemory:
    """With a gradient buffer, and what compression takes."""
    from shoal.sync.compressed_sum import compressed_memory

    flat = sizes.flat
    bodies = [without_header(flat, bucket) for bucket in buckets]
    compressed = compressed_memory(compress, sizes, bodies, rank, replicas)
    return replace(
        memory,
        gradients=sizes.bucketed_gradients(buckets),
        copies=sizes.gap_index,
        residuals=compressed.residuals,
        in_flight=compressed.in_flight,
    )


def without_header(layout: FlatLayout, bucket: slice) -> slice:
    """A bucket without the header, which travels uncompressed."""
    return slice(max(bucket.start, layout.offset), bucket.stop)
