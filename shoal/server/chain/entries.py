"""The part of a log that is still needed."""

from __future__ import annotations

from collections import deque

from shoal.server.chain.config import Entry
from shoal.server.chain.messages import Acked, Append, Ask, Confirm, Teach


class EntryLog:
    """The entries after `base`, without a gap. `weight` is what they take up together."""

    def __init__(self, base: int = 0):
        self.base = base
        self.weight = 0
        self._entries: deque[Entry] = deque()
        self._weights: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def end(self) -> int:
        return self.base + len(self._entries)

    def append(self, entry: Entry, weight: int = 1) -> None:
        assert entry.position == self.end + 1, f"{entry.position} does not follow {self.end}"
        self._entries.append(entry)
        self._weights.append(weight)
        self.weight += weight

    def between(self, after: int, upto: int) -> tuple[Entry, ...]:
        """Entries `after` + 1 to `upto`."""
        assert self.base <= after, f"entries up to {self.base} are gone, {after + 1} is wanted"
        return tuple(self._entries[i - self.base] for i in range(after, min(upto, self.end)))

    def drop(self, upto: int) -> None:
        while self._entries and self._entries[0].position <= upto:
            self._entries.popleft()
            self.weight -= self._weights.popleft()
            self.base += 1


# these messages are served while operations are applied; others when all that is logged is
WHILE_APPLYING = (Append, Acked, Ask, Confirm, Teach)


def take(entries: deque[Entry], upto: int | None = None) -> Entry | None:
    """The next one, if its position is no later than `upto`."""
    if not entries or (upto is not None and entries[0].position > upto):
        return None
    return entries.popleft()
