"""A push in fewer bytes: what `compress="…"` makes of one server's slice, for both sides.

    worker   gradient + residual ── pack ──> PACKED ──> unpack ──> staged   server
             residual = what the bytes do not hold

How many bytes that are follows from the spec alone. A server unpacks a push when it arrives, into
memory of its own, so that adding up does not know of it; bytes that mean nothing are refused then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.compress.catalog import make_compressor
from shoal.compress.powersgd import PowerSgd
from shoal.errors import ShoalError
from shoal.server.model.shard import DTYPES
from shoal.server.protocol.frames import Refused
from shoal.server.protocol.messages import Spec
from shoal.strategy.terms import Ps


class Packing:
    """One slice as bytes. PowerSGD takes each parameter, or the rows of it that lie here."""

    def __init__(self, spec: Spec):
        assert spec.compress is not None
        text = str(Ps(compress=spec.compress).compress)  # refuses what is none of the six
        self.size = spec.stop - spec.start
        shapes = [(cut.start - spec.start, cut.shape) for cut in spec.cuts]
        self.compressor = make_compressor(text, shapes, self.size)
        self.num_bytes = self.compressor.num_bytes(self.size) if self.size else 0
        self.residual_dtype = torch.promote_types(DTYPES[spec.dtype], torch.float32)

    @property
    def kept_bytes(self) -> int:
        """What a worker carries from step to step: its residual, and PowerSGD's basis."""
        return self.size * self.residual_dtype.itemsize + 4 * self.basis.numel()

    @property
    def basis(self) -> Tensor:
        if isinstance(self.compressor, PowerSgd):
            return self.compressor.basis
        return torch.zeros(0)

    @basis.setter
    def basis(self, basis: Tensor) -> None:
        if isinstance(self.compressor, PowerSgd):
            self.compressor.basis = basis

    def pack(self, gradient: Tensor, residual: Tensor, feedback: bool = True) -> Tensor:
        """The bytes to push; what they do not hold is left in `residual`."""
        wanted = gradient + residual
        packed = self.compressor.pack(wanted)
        if feedback:
            torch.sub(wanted, self.compressor.unpack(packed, self.size), out=residual)
        return packed.cpu()

    def unpack(self, payload: Tensor, into: Tensor) -> None:
        """What the bytes of a worker stand for."""
        try:
            into.copy_(self.compressor.unpack(payload, self.size))
        except ShoalError as error:
            raise Refused(str(error)) from error
