"""Operations that are logged here and not applied yet, and what waits for them.

Applying takes long. Meanwhile messages of other replicas are served, and operations of other
workers are logged and passed on. What releases a push that is lent (its worker may overwrite it
then) is sent to the predecessor only when the push is applied here.
"""

from __future__ import annotations

from collections import deque

from shoal.server.chain.config import Entry
from shoal.server.chain.messages import Acked, Append, Ask, At, Confirm, Send, Teach

# these messages are served while operations are applied; others when all that is logged is
WHILE_APPLYING = (Append, Acked, Ask, Confirm, Teach)


class Unapplied:
    """In the order of the log. Guarded by the replica's lock; `take` by the one for applying."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._lent: deque[int] = deque()  # positions of those that are lent
        self._held: list[Send] = []

    def add(self, entry: Entry, is_lent: bool) -> None:
        self._entries.append(entry)
        if is_lent:
            self._lent.append(entry.position)

    def take(self, upto: int | None = None) -> Entry | None:
        """The next one, if its position is no later than `upto`."""
        if not self._entries or (upto is not None and self._entries[0].position > upto):
            return None
        return self._entries.popleft()

    def needs(self, position: int) -> bool:
        """Whether the memory of a worker is needed for this one."""
        return position in self._lent

    def holds(self, effect: Send) -> bool:
        """Whether a message has to wait for a push that is lent; then it is kept here."""
        if not self._lent or _releases(effect) < self._lent[0]:
            return False
        self._held.append(effect)
        return True

    def applied(self, position: int) -> list[Send]:
        """What may be sent now."""
        if not self._lent or self._lent[0] != position:
            return []
        self._lent.popleft()
        held = self._held
        self._held = []
        return [effect for effect in held if not self.holds(effect)]

    def clear(self) -> None:
        self._entries.clear()
        self._lent.clear()
        self._held.clear()


def _releases(effect: Send) -> int:
    """Up to which position a message says that this replica has no need of the workers' memory."""
    message = effect.message
    if isinstance(message, Acked):
        return message.position
    return message.committed if isinstance(message, At) else 0
