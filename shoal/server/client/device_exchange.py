"""Pushes and pulls of a worker in memory on the GPU that it shares with all of its servers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.protocol.frames import FrameKind, decode, encode
from shoal.server import device_memory
from shoal.server.client.link import ServerLink
from shoal.server.client.route import Request
from shoal.server.device_memory import DeviceSegment
from shoal.server.messages import DeviceAsked, DeviceOffered, ModelSpec
from shoal.transport import cuda_ipc


class DeviceExchange:
    """`out` and `inbox` are as those of a client, and on the GPU."""

    def __init__(
        self, specs: Sequence[ModelSpec], segments: Sequence[DeviceSegment], device: torch.device
    ):
        self._specs = specs
        self._segments = segments
        self._stream_of = device
        size = specs[0].size
        first = segments[0]
        self.out = first.out.new_zeros(len(first.out), size)
        self.inbox = first.inbox.new_zeros(size)

    def push(self, elements: slice) -> None:
        """Copy these elements of `out` to the servers that hold them."""
        for segment, spec in zip(self._segments, self._specs, strict=True):
            start = max(elements.start, spec.start)
            stop = min(elements.stop, spec.stop)
            if start < stop:
                held = slice(start - spec.start, stop - spec.start)
                segment.out[:, held].copy_(self.out[:, start:stop])

    def take(self) -> None:
        """Copy what the servers have written to `inbox`; they may then write again."""
        for segment, spec in zip(self._segments, self._specs, strict=True):
            self.inbox[spec.start : spec.stop].copy_(segment.inbox)
        self.synchronize()

    def synchronize(self) -> None:
        """Return when the copies have been made: servers know nothing of this process's stream."""
        torch.cuda.current_stream(self._stream_of).synchronize()


def share_device(
    links: Sequence[ServerLink], specs: Sequence[ModelSpec], device: torch.device
) -> DeviceExchange | None:
    """None where this is not the GPU of all servers, or its memory cannot be shared."""
    asked = encode(DeviceAsked(cuda_ipc.device_name(device), device_memory.this_process()))
    segments = []
    for link, spec in zip(links, specs, strict=True):
        answer = link.call("control", Request(FrameKind.SHARE_DEVICE, asked)).meta
        segment = device_memory.open_offer(decode(answer, DeviceOffered), spec, device)
        if segment is None:
            return None
        segments.append(segment)
    accepted = encode(DeviceAsked(is_accepted=True))
    for link in links:
        link.call("control", Request(FrameKind.SHARE_DEVICE, accepted))
    return DeviceExchange(specs, segments, device)
