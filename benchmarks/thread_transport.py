"""Ranks that are threads of one process: messages through mailboxes in its memory."""

from __future__ import annotations

import threading
from collections import defaultdict, deque

from torch import Tensor

from shoal.comm.transport.transport import DoneWork, PendingWork, Work
from shoal.errors import PeerLost, ShoalError


class Mailboxes:
    """What the threads of one world share. `break_all` wakes every rank that still waits."""

    def __init__(self, size: int, timeout_s: float = 60.0):
        self.size = size
        self.timeout_s = timeout_s
        self._boxes: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._broken_by: int | None = None

    def put(self, key: tuple[int, int, int], data: Tensor) -> None:
        with self._changed:
            self._boxes[key].append(data)
            self._changed.notify_all()

    def take(self, key: tuple[int, int, int]) -> Tensor:
        src, dst, tag = key
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._boxes[key] or self._broken_by is not None, self.timeout_s
            )
            if self._boxes[key]:
                return self._boxes[key].popleft()
            peer = src if self._broken_by is None else self._broken_by
            raise PeerLost(dst, peer, f"recv tag {tag}", None if arrived else self.timeout_s)

    def break_all(self, rank: int) -> None:
        """`rank` has failed: every waiting rank gets a `PeerLost`."""
        with self._changed:
            if self._broken_by is None:
                self._broken_by = rank
            self._changed.notify_all()


class ThreadTransport:
    """One rank's end of the mailboxes. A send copies, so it returns at once."""

    def __init__(self, boxes: Mailboxes, rank: int):
        self._boxes = boxes
        self.rank = rank
        self.size = boxes.size

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        self._boxes.put((self.rank, dst, tag), data.detach().clone())
        return DoneWork()

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        def receive() -> None:
            data = self._boxes.take((src, self.rank, tag))
            if data.shape != into.shape or data.dtype != into.dtype:
                raise ShoalError(
                    f"rank {self.rank} expected {tuple(into.shape)} {into.dtype} from rank {src} "
                    f"with tag {tag}, got {tuple(data.shape)} {data.dtype}"
                )
            into.copy_(data)

        return PendingWork(receive)
