"""The state of a server on its way to a copy that comes back: all models, in one frame."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import msgspec
import torch

from shoal.protocol.connection import Connection
from shoal.protocol.frames import FrameKind, Header, Refused, decode, encode
from shoal.runtime.failpoints import failpoint
from shoal.server.consistency import Count
from shoal.server.messages import WireMessage
from shoal.server.model.shard import DTYPES
from shoal.server.model.snapshot import ModelImage, image_of, install
from shoal.server.process.model_host import MAX_MODELS, ModelHost
from shoal.server.shared_memory import bytes_of


class Snapshot(WireMessage, frozen=True):
    """Their tensors are the payload, in the same order."""

    incarnation: Count
    position: Count
    images: Annotated[tuple[ModelImage, ...], msgspec.Meta(max_length=MAX_MODELS)]


def snapshot_sender(
    host: ModelHost, incarnation: int, position: int
) -> Callable[[Connection, Header], None]:
    """Copy the state now; the function that is returned sends it."""
    failpoint("snapshot.begin")
    found = [image_of(number, model) for number, model in sorted(host.models.items())]
    meta = encode(Snapshot(incarnation, position, tuple(image for image, _ in found)))
    views = [bytes_of(tensor) for _, tensors in found for tensor in tensors]

    def send(connection: Connection, header: Header) -> None:
        connection.send(header._replace(kind=FrameKind.SNAPSHOT), meta, *views)

    return send


def read_snapshot(
    meta: bytes, connection: Connection, num_bytes: int, max_bytes: int
) -> tuple[Snapshot, list[torch.Tensor]]:
    """Refused, before anything is allocated, where the lengths do not fit."""
    snapshot = decode(meta, Snapshot)
    forms = [form for image in snapshot.images for form in image.tensors]
    expected = sum(math.prod(form.shape) * DTYPES[form.dtype].itemsize for form in forms)
    if num_bytes != expected or expected > max_bytes:
        raise Refused(f"a snapshot of {num_bytes} bytes, expected {expected}")
    tensors = [torch.empty(form.shape, dtype=DTYPES[form.dtype]) for form in forms]
    for tensor in tensors:
        connection.read_into(bytes_of(tensor))
    return snapshot, tensors


def install_images(host: ModelHost, snapshot: Snapshot, tensors: list[torch.Tensor]) -> None:
    """Hold the models in this state; Refused if tensors and description do not fit."""
    source = iter(tensors)
    for image in snapshot.images:
        model = host.hold(image.number, image.saved.spec)
        try:
            with model.lock:
                install(model, image, source)
                model.lock.notify_all()
        except (StopIteration, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise Refused(f"the state of another replica does not fit: {error}") from error
