"""Images of all models of a server on their way to a copy that comes back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.protocol.connection import Connection
from shoal.protocol.frames import FrameKind, Header, Refused, decode, encode
from shoal.runtime.failpoints import failpoint
from shoal.server.consistency import Count
from shoal.server.messages import WireMessage
from shoal.server.model.shard import DTYPES
from shoal.server.model.snapshot import ModelImage, image_of, install
from shoal.server.process.model_host import MAX_MODELS, ModelHost
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
    expected = sum(math.prod(form.shape) * DTYPES[form.dtype].itemsize for form in image.tensors)
    if num_bytes != expected or expected > max_bytes:
        raise Refused(f"a snapshot of {num_bytes} bytes, expected {expected}")
    tensors = [torch.empty(form.shape, dtype=DTYPES[form.dtype]) for form in image.tensors]
    for tensor in tensors:
        connection.read_into(bytes_of(tensor))
    return image, tensors


def install_image(host: ModelHost, image: ModelImage, tensors: list[Tensor]) -> None:
    """Hold the model in this state; Refused if tensors and description do not fit."""
    model = host.hold(image.number, image.saved.spec)
    try:
        with model.lock:
            install(model, image, iter(tensors))
            model.lock.notify_all()
    except (StopIteration, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"the state of another replica does not fit: {error}") from error
