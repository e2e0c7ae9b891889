"""Messages about memory on a GPU (`server/device_memory.py`)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.server.consistency import Count
from shoal.server.protocol.hello import WireMessage

ShortText = Annotated[str, msgspec.Meta(max_length=128)]


class DeviceAsked(WireMessage, frozen=True):
    """A worker asks for memory on its GPU; `is_accepted`: it uses what it was offered."""

    device: ShortText = ""  # the UUID of the GPU
    process: ShortText = ""
    is_accepted: bool = False


class DeviceOffered(WireMessage, frozen=True):
    """The memory: a handle, or its number in the process of the server. Neither: there is none."""

    handle: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    number: Count = 0
