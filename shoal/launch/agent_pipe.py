"""The stdout of an agent, through which it reports to its launcher."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import Any

import msgspec


class AgentPipe:
    """Messages of several threads, each complete in a line of its own."""

    def __init__(self) -> None:
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """A launcher that is gone cannot read it: then this agent is killed soon."""
        data = msgspec.json.encode(message) + b"\n"
        with self._sending, suppress(BrokenPipeError):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
