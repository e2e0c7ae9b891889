"""A few words that ranks tell each other by a collective, such as where memory is to be found."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from shoal.comm.group import Group, Op
from shoal.errors import BadInput

ROOM_BYTES = 64


def tell_all(
    group: Group, said: bytes, room_bytes: int = ROOM_BYTES, device: torch.device | None = None
) -> list[bytes]:
    """What every rank says, by rank: one all-gather. All ranks call it with the same room."""
    own = _entry(said, room_bytes, device)
    everything = own.new_empty(group.size, room_bytes)
    group.all_gather(everything, own).wait()
    return [_words(row) for row in everything]


def tell(group: Group, said: bytes, root: int, room_bytes: int = ROOM_BYTES) -> bytes:
    """What the root says: one broadcast. What the others say is not heard."""
    entry = _entry(said, room_bytes)
    group.broadcast(entry, root).wait()
    return _words(entry)


def all_say(group: Group, said: bytes, device: torch.device | None = None) -> bool:
    """Whether all ranks say the same, of any length: one all-reduce of 16 bytes."""
    number = int.from_bytes(hashlib.sha256(said).digest()[:7], "big")
    highest = torch.tensor([number, -number], device=device)
    group.all_reduce(highest, Op.MAX).wait()
    return highest.tolist() == [number, -number]


def _entry(said: bytes, room_bytes: int, device: torch.device | None = None) -> Tensor:
    if len(said) > room_bytes:
        raise BadInput(f"{said!r} is longer than the {room_bytes} bytes that ranks tell each other")
    return torch.tensor(list(said.ljust(room_bytes, b"\0")), dtype=torch.uint8, device=device)


def _words(entry: Tensor) -> bytes:
    return bytes(entry.tolist()).rstrip(b"\0")
