"""What a worker knows of the chain of one shard, and whom it asks. Without a clock or a socket."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.server.protocol.hello import Moved


@dataclass
class ChainView:
    """The latest epoch that a replica has announced, with its head and members.

    Epochs only grow: what a replica of an earlier epoch says, such as a head that was stopped
    and goes on, has no effect.
    """

    replicas: int
    worker: int
    epoch: int = 0  # none is known
    head: int | None = None
    members: tuple[int, ...] = ()

    def learn(self, moved: Moved) -> bool:
        """Whether it says something that was not known."""
        head = moved.head if moved.head is not None and moved.head < self.replicas else None
        is_new = moved.epoch > self.epoch
        completes = moved.epoch == self.epoch and self.head is None and head is not None
        if not is_new and not completes:
            return False
        self.epoch = moved.epoch
        self.head = head
        self.members = tuple(member for member in moved.members if member < self.replicas)
        return True

    def to_ask(self) -> list[int]:
        """All replicas, in the order in which to look for the head."""
        first = () if self.head is None else (self.head,)
        return list(dict.fromkeys((*first, *self.members, *range(self.replicas))))

    def readers(self) -> list[int]:
        """Members in the order in which this worker pulls from them; the head if none is known."""
        if not self.members:
            return [] if self.head is None else [self.head]
        first = self.worker % len(self.members)
        return [*self.members[first:], *self.members[:first]]
