"""Compressed pushes of one worker, with error feedback.

A slice is packed when the last of its gradients is final, so with several servers the later ones
are on their way while backward still runs. Weights (or sums) come down in full: they are the same
for all workers, whichever of them are late or lost.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from shoal.replica.flat_params import FlatParams
from shoal.server.client import Client
from shoal.server.link import Reply, Request
from shoal.server.model.compression import PushCompression
from shoal.server.protocol.frames import FrameKind, decode
from shoal.server.protocol.messages import SavedResidual
from shoal.server.shared_memory import bytes_of
from shoal.sync.base import Copies
from shoal.sync.compressed_sum import take_residual, unused_places

PREFIX = "gradients/"


class PackedPush:
    """What goes to each server, and what is still to be sent."""

    feedback: bool = True  # False: what compression loses is lost, to see what that does

    def __init__(self, flat: FlatParams, client: Client, copies: Copies | None = None):
        self.flat = flat
        self.client = client
        self.packings = [PushCompression(spec) for spec in client.specs]
        dtype = self.packings[0].residual_dtype
        self.residual = torch.zeros(flat.size, dtype=dtype, device=flat.device)
        self.pushes = self.pushed_bytes = 0
        self._gaps = flat.gaps()
        self._unused = unused_places(flat, copies)
        rule = client.specs[0].rule
        drops = rule.quorum is not None and not rule.fold
        self._before = self.residual.clone() if drops else None

    def reduce(self, bucket: slice) -> None:
        """Buckets run from the end of the buffer to its start: who begins in this one is whole."""
        for index, (spec, packing) in enumerate(zip(self.client.specs, self.packings, strict=True)):
            if packing.num_bytes and bucket.start <= spec.start < bucket.stop:
                self._push(index, slice(spec.start, spec.stop), packing)
        if bucket.start == 0:
            self.pushes += 1

    def _push(self, index: int, run: slice, packing: PushCompression) -> None:
        link = self.client.links[index]
        sequence = self.client.sequence + 1
        self.flat.grads.buffer[self._gaps] = 0.0  # a sum that came down has left noise there
        if self._before is not None:
            self._before[run] = self.residual[run]
        packed = packing.pack(self.flat.grads.buffer[run], self.residual[run], self.feedback)
        self.residual[self._unused] = 0.0  # of no use, and no checkpoint has it
        self.pushed_bytes += packed.nbytes
        request = Request(
            FrameKind.COMPRESSED, payload=(bytes_of(packed),), sequence=sequence, is_answered=False
        )
        link.post("push", request)

    def take_back(self) -> None:
        """The push was dropped as late: its gradient is lost, and nothing of earlier ones."""
        assert self._before is not None
        self.residual.copy_(self._before)

    # ------------------------------------------------------------------ checkpoints

    def leave_with_servers(self) -> None:
        """What is still to be sent, for whoever saves it."""
        for future in [self._keep(index) for index in range(len(self.packings))]:
            future.result()

    def collect(self) -> dict[str, Tensor]:
        """What the workers that are there have left with the servers."""
        saved: dict[str, Tensor] = {}
        for worker in range(self.client.specs[0].rule.workers):
            saved |= self._saved(worker)
        return {f"{PREFIX}{name}": tensor for name, tensor in saved.items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Everybody takes his own back; another number of workers shares the sum equally."""
        own = {n.removeprefix(PREFIX): t for n, t in tensors.items() if n.startswith(PREFIX)}
        rank = self.client.rank
        take_residual(own, self.residual, rank, self.client.specs[0].rule.workers)
        self.residual[self._unused] = 0.0
        for index, packing in enumerate(self.packings):
            basis = own.get(f"worker/{rank}/basis/{index}")
            if basis is not None and basis.shape == packing.basis.shape:
                packing.basis = basis.to(self.flat.device)

    def _keep(self, index: int) -> Future[Reply]:
        """Leave with a server what is this worker's own of its slice."""
        spec = self.client.specs[index]
        packing = self.packings[index]
        tensors = [self.residual[spec.start : spec.stop].cpu(), packing.basis.cpu()]
        request = Request(FrameKind.RESIDUAL_SET, payload=tuple(map(bytes_of, tensors)))
        return self.client.links[index].post("push", request)

    def _saved(self, worker: int) -> dict[str, Tensor]:
        """What a worker has left with the servers; nothing if it has gone."""
        found = {}
        residual = torch.zeros(self.flat.size, dtype=self.residual.dtype)
        for index, (spec, packing) in enumerate(zip(self.client.specs, self.packings, strict=True)):
            basis = torch.empty_like(packing.basis, device="cpu")
            into = residual[spec.start : spec.stop], basis
            if not self._fetch(index, worker, *into):
                return {}
            if basis.numel():
                found[f"worker/{worker}/basis/{index}"] = basis
        return {f"worker/{worker}/residual": residual, **found}

    def _fetch(self, index: int, worker: int, *into: Tensor) -> bool:
        request = Request(FrameKind.RESIDUAL_GET, into=tuple(map(bytes_of, into)), argument=worker)
        reply = self.client.links[index].post("pull", request).result()
        return decode(reply.meta, SavedResidual).is_saved

    # ------------------------------------------------------------------ what happened

    def report(self) -> dict[str, Any]:
        return {"pushed_bytes": self.pushed_bytes, "pushes": self.pushes}

    def summary(self) -> list[str]:
        if not self.pushed_bytes:
            return []
        each = self.pushed_bytes / self.pushes
        plain = self._plain_bytes()
        return [
            f"each worker pushed {each:,.0f} bytes a step, which are {plain:,} in full: "
            f"{plain / each:.1f} times less"
        ]

    def _plain_bytes(self) -> int:
        size = sum(spec.stop - spec.start for spec in self.client.specs)
        return size * self.flat.data.element_size()
