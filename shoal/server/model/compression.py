"""A push in fewer bytes: what `compress="…"` makes of one server's slice, for both sides.

    worker   gradient + residual ── pack ──> COMPRESSED ──> unpack ──> push buffer   server
             residual = what the bytes do not hold

The number of bytes follows from the spec alone. A server unpacks a push when it arrives and
refuses invalid bytes then, so that sums are computed as without compression.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.compress import PowerSgd, make_compressor
from shoal.errors import ShoalError
from shoal.server.messages import ModelSpec
from shoal.server.model.shard import DTYPES
from shoal.server.protocol import Refused
from shoal.strategy.ps_term import Ps


class PushCompression:
    """One slice as bytes. PowerSGD compresses each parameter, or the rows of it that are here."""

    def __init__(self, spec: ModelSpec):
        assert spec.compress is not None
        text = str(Ps(compress=spec.compress).compress)  # refuses unknown ones
        self.size = spec.stop - spec.start
        shapes = [(held.start - spec.start, held.shape) for held in spec.slices]
        self.compressor = make_compressor(text, shapes, self.size)
        self.num_bytes = self.compressor.num_bytes(self.size) if self.size else 0
        self.residual_dtype = torch.promote_types(DTYPES[spec.dtype], torch.float32)

    @property
    def residual_bytes(self) -> int:
        """What a worker carries from step to step: its residual, and PowerSGD's basis."""
        return self.size * self.residual_dtype.itemsize + 4 * self.basis.numel()

    def read_residual(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """The residual and the basis in `residual_bytes` bytes."""
        stop = self.size * self.residual_dtype.itemsize
        residual = data[:stop].clone().view(self.residual_dtype)
        return residual, data[stop:].clone().view(torch.float32)

    @property
    def basis(self) -> Tensor:
        if isinstance(self.compressor, PowerSgd):
            return self.compressor.basis
        return torch.zeros(0)

    @basis.setter
    def basis(self, basis: Tensor) -> None:
        if isinstance(self.compressor, PowerSgd):
            self.compressor.basis = basis

    def pack(self, gradient: Tensor, residual: Tensor) -> Tensor:
        """The bytes to push; `residual` becomes what they do not hold."""
        corrected = gradient + residual
        packed = self.compressor.pack(corrected)
        torch.sub(corrected, self.compressor.unpack(packed, self.size), out=residual)
        return packed.cpu()

    def unpack(self, payload: Tensor, into: Tensor) -> None:
        """Decompress the bytes of a worker; Refused if they are invalid."""
        try:
            into.copy_(self.compressor.unpack(payload, self.size))
        except ShoalError as error:
            raise Refused(str(error)) from error
