"""Operations that are logged here and not applied yet.

Applying takes long. Meanwhile messages of other members are served, and operations of other
workers are logged and passed on.
"""

from __future__ import annotations

from collections import deque

from shoal.server.chain.config import Entry
from shoal.server.chain.messages import Acked, Append, Ask, Confirm, Teach

# these messages are served while operations are applied; others when all that is logged is
WHILE_APPLYING = (Append, Acked, Ask, Confirm, Teach)


class Unapplied:
    """In the order of the log. Guarded by the copy's lock; `take` by the one for applying."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)

    def take(self, upto: int | None = None) -> Entry | None:
        """The next one, if its position is no later than `upto`."""
        if not self._entries or (upto is not None and self._entries[0].position > upto):
            return None
        return self._entries.popleft()

    def clear(self) -> None:
        self._entries.clear()
