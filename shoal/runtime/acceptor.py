"""Accepts connections, whatever happens to them: the one place for all loops that accept.

    the connection has ended (ECONNABORTED …)          the next one, after a pause
    no descriptors, no memory (EMFILE, ENFILE …)       a stranger is ended for the newcomer; where
                                                       there is none, one that waits is closed
    the listener has failed (EBADF, EINVAL)            raised; None if it was closed

A loop without the pauses would take a core for as long as the condition lasts.
"""

from __future__ import annotations

import errno
import io
import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from shoal.runtime.wording import say

_PAUSE_S = 0.02
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FAILED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)


def no_room() -> bool:
    """For listeners whose connections need no proof."""
    return False


class Acceptor:
    """Accepts at a socket that listens, and owns it.

    A descriptor is kept in reserve: where the process has no other left, it serves to accept
    connections and close them, so that those who connect learn it at once and try again.
    """

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._closed = threading.Event()
        self._reserve = io.FileIO(os.devnull)
        self._has_said = False

    def accept(self, make_room: Callable[[], bool] = no_room) -> socket.socket | None:
        """The next connection, however long it takes; None once this is closed.

        `make_room` ends a connection that has not proven anything; False where there is none.
        """
        while not self._closed.is_set():
            accepted = self.accept_now(make_room)
            if accepted is not None:
                return accepted
        return None

    def accept_now(self, make_room: Callable[[], bool] = no_room) -> socket.socket | None:
        """One attempt; None where it has failed, after a pause, or where no connection waits."""
        try:
            return self.sock.accept()[0]
        except BlockingIOError:
            return None
        except OSError as error:
            if self._closed.is_set():
                return None
            if error.errno in _FAILED:
                raise
            if error.errno not in _SCARCE:
                self._closed.wait(_PAUSE_S)
            elif not make_room():
                self._shed(error)
            return None

    def close(self) -> None:
        """A thread that accepts returns."""
        self._closed.set()
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self._reserve.close()

    def _shed(self, error: OSError) -> None:
        """Close a waiting connection, and let those that end give descriptors back."""
        self._say(error)
        self._reserve.close()
        with suppress(OSError, ValueError):  # closed meanwhile
            poll = select.poll()
            poll.register(self.sock, select.POLLIN)
            if poll.poll(0):
                self.sock.accept()[0].close()
        with suppress(OSError):
            self._reserve = io.FileIO(os.devnull)
        if self._closed.wait(_PAUSE_S):
            self._reserve.close()

    def _say(self, error: OSError) -> None:
        if not self._has_said:
            self._has_said = True
            say(
                f"process {os.getpid()} closes connections that it cannot accept "
                f"({os.strerror(error.errno or 0)}), until others end: raise the limit with "
                "ulimit -n"
            )
