"""How a launcher notices that a host of an elastic run is lost: each agent keeps a connection.

The connection is to the board of the run, over the network between the hosts. It breaks when the
agent is killed, and when one of both sides is silent for a few seconds (`SILENT_HOST_S`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from shoal.comm.guarded_store.link import StoreLink, connect
from shoal.comm.guarded_store.session import BadFrame, StoreRequest
from shoal.errors import BadInput, ShoalError

_CONNECT_S = 15.0  # the launcher listens before it starts an agent
_ANSWER_S = 10.0
_NEVER = "the end of the run"  # a key that is not written


class LauncherUnreachable(ShoalError):
    """This host is cut off from that of the launcher."""

    def __init__(self, address: tuple[str, int]):
        where = f"{address[0]}:{address[1]}"
        super().__init__(f"it did not reach the launcher at {where} in {_CONNECT_S:g} s")


class Presence:
    """Use as a block: at its end the launcher knows that this agent ends by itself."""

    def __init__(
        self, address: tuple[str, int], secret: bytes, name: str, on_lost: Callable[[], None]
    ):
        """`on_lost` is called, from a thread, when the launcher cannot be reached any more."""
        self._address = address
        self._secret = secret
        self._name = name
        self._on_lost = on_lost
        self._is_closed = False
        self._thread = threading.Thread(target=self._wait, name="shoal-presence", daemon=True)

    def __enter__(self) -> Presence:
        self._shown = self._connect()
        self._watched = self._connect()
        self._shown.ask(StoreRequest("present", [self._name]), _ANSWER_S)
        self._thread.start()
        return self

    def _connect(self) -> StoreLink:
        try:
            link = connect(self._address, self._secret, _CONNECT_S)
        except BadInput:
            raise
        except ShoalError:
            raise LauncherUnreachable(self._address) from None
        link.notice_silence()
        return link

    def _wait(self) -> None:
        with suppress(OSError, BadFrame):
            self._watched.ask(StoreRequest("wait", [_NEVER]), None)
        if not self._is_closed:
            self._on_lost()

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        with suppress(OSError, BadFrame):
            self._shown.ask(StoreRequest("present"), _ANSWER_S)
        self._watched.interrupt()
        self._thread.join()
        self._shown.close()
        self._watched.close()
