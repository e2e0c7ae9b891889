"""What a server does with compressed pushes, and with what workers have not sent yet."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.server.model.compression import Packing
from shoal.server.model.served_model import Holding, Member
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.frames import Header, Kind, Refused, encode
from shoal.server.protocol.messages import Kept
from shoal.server.shared_memory import bytes_of


class PackedRequests:
    """The handlers of one connection; `here` is whose it is, `answer` sends an answer."""

    def __init__(
        self,
        connection: Connection,
        here: Callable[[], tuple[Holding, Member]],
        answer: Callable[..., None],
    ):
        self._connection = connection
        self._here = here
        self._answer = answer

    def push(self, header: Header, meta: bytes) -> None:
        """The gradients of a push, whole; no answer."""
        holding, member = self._here()
        packing = _packing(holding, header, lambda packing: packing.num_bytes)
        if header.sequence <= member.watermark:
            self._connection.pass_over(header.payload_bytes)
            return
        holding.expect(member, header.sequence)
        payload = torch.empty(header.payload_bytes, dtype=torch.uint8)
        self._connection.read_into(bytes_of(payload))
        packing.unpack(payload, member.staged[0])
        member.unpacked = header.sequence

    def keep(self, header: Header, meta: bytes) -> None:
        """What a worker carries from step to step, for whoever saves it."""
        holding, member = self._here()
        _packing(holding, header, lambda packing: packing.kept_bytes)
        kept = bytearray(header.payload_bytes)
        self._connection.read_into(memoryview(kept))
        member.kept = kept
        self._answer(Kind.OK)

    def kept(self, header: Header, meta: bytes) -> None:
        """What the worker that `argument` names has left here; zeros where it has gone."""
        holding, _ = self._here()
        if holding.packing is None:
            raise Refused("nothing is compressed here")
        with holding.changed:
            owner = holding.members.get(header.argument)
            is_there = owner is not None and header.argument not in holding.gone
            kept = owner.kept if owner is not None and is_there else None
        payload = bytearray(holding.packing.kept_bytes) if kept is None else kept
        self._answer(Kind.OK, encode(Kept(kept is not None)), memoryview(payload))


def _packing(holding: Holding, header: Header, num_bytes: Callable[[Packing], int]) -> Packing:
    """Refuse a payload of another length before anything is allocated for it."""
    packing = holding.packing
    if packing is None:
        raise Refused(f"{header.kind.name}, and nothing is compressed here")
    if header.payload_bytes != num_bytes(packing):
        raise Refused(
            f"{header.kind.name} of {header.payload_bytes} bytes, and {num_bytes(packing)} fit"
        )
    return packing
