"""The state of a replica on its way to one that comes back.

tail ── SNAPSHOT head ───────────────────> learner      which state: incarnation, position
tail ── SNAPSHOT description, tensors ───> learner      one frame for each model
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from shoal.runtime.failpoints import failpoint
from shoal.server.consistency import Count
from shoal.server.model_host import MAX_MODELS, ModelHost
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.frames import FrameKind, Header, Refused, decode, encode
from shoal.server.protocol.messages import WireMessage
from shoal.server.replicas.images import ModelImage, bytes_of_image, empty_tensors, image_of
from shoal.server.shared_memory import bytes_of


class SnapshotHead(WireMessage, frozen=True):
    incarnation: Count
    position: Count
    models: Count


@dataclass
class Incoming:
    """A snapshot that is being received, all of it over one connection."""

    connection: Connection
    head: SnapshotHead
    images: list[tuple[ModelImage, list[Tensor]]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.images) == self.head.models


def snapshot_sender(
    host: ModelHost, incarnation: int, position: int
) -> Callable[[Connection, Header], None]:
    """Copy the state now; the function that is returned sends it."""
    failpoint("snapshot.begin")
    images = [image_of(number, model) for number, model in sorted(host.models.items())]
    head = SnapshotHead(incarnation, position, len(images))

    def send(connection: Connection, header: Header) -> None:
        frame = header._replace(kind=FrameKind.SNAPSHOT)
        connection.send(frame._replace(argument=1), encode(head))
        for image, tensors in images:
            connection.send(frame, encode(image), *map(bytes_of, tensors))

    return send


def read_head(meta: bytes) -> SnapshotHead:
    head = decode(meta, SnapshotHead)
    if head.models > MAX_MODELS:
        raise Refused(f"a snapshot of {head.models} models")
    return head


def read_image(
    meta: bytes, connection: Connection, num_bytes: int, max_bytes: int
) -> tuple[ModelImage, list[Tensor]]:
    """Refused, before anything is allocated, where the lengths do not fit."""
    image = decode(meta, ModelImage)
    expected = bytes_of_image(image)
    if num_bytes != expected or expected > max_bytes:
        raise Refused(f"a snapshot of {num_bytes} bytes, expected {expected}")
    tensors = empty_tensors(image)
    for tensor in tensors:
        connection.read_into(bytes_of(tensor))
    return image, tensors
