"""The search for the head of a chain, shared by all threads of one worker.

One replica after the other is asked which epoch it is in, until the head of the latest one takes
SETUP. Other members answer, too, and are not taken for the head.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from shoal.errors import PeerLost
from shoal.server.broken import Broken, MovedAway
from shoal.server.chain_view import ChainView
from shoal.server.link import RETRY_S
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.frames import Refused
from shoal.server.protocol.hello import Moved

FIRST_ASK_S = 0.5  # how long a replica has to answer; twice as long in every round
LONGEST_ASK_S = 8.0


class SearchedChain(Protocol):
    """What a `ChainLink` gives."""

    view: ChainView

    @property
    def is_closing(self) -> bool: ...
    def learn(self, moved: Moved) -> bool: ...
    def set_up(self, replica: int, timeout_s: float) -> Connection: ...
    def ask_epoch(self, replica: int, timeout_s: float) -> None: ...
    def found_head(self, replica: int) -> None: ...
    def drop(self, connection: Connection) -> None: ...
    def not_found(self, began_s: float, reason: Exception | None) -> PeerLost: ...


class HeadSearch:
    """The head that was found last, and a control connection to it."""

    def __init__(self, chain: SearchedChain):
        self.generation = 0  # how often a head has been found
        self.found_at: int | None = None  # the replica that was found last
        self._chain = chain
        self._searching = threading.Lock()
        self._control: Connection | None = None  # from the thread that found it

    def ensure(self, lost: int, timeout_s: float) -> bool:
        """Find the head, unless another thread has done so since generation `lost`.

        Whether it was found by this call.
        """
        with self._searching:
            if lost != self.generation:
                return False
            replica, connection = self.find(timeout_s)
            self._chain.found_head(replica)
            self.found_at = replica
            before = self._control
            self._control = connection
            self.generation += 1
        if before is not None:
            self._chain.drop(before)
        return True

    def take_control(self) -> Connection | None:
        """The connection to the head, for the first that asks for it."""
        with self._searching:
            control = self._control
            self._control = None
            return control

    def find(self, timeout_s: float) -> tuple[int, Connection]:
        """The head, and a control connection to it; PeerLost after `timeout_s`."""
        chain = self._chain
        began_s = time.monotonic()
        ask_s = FIRST_ASK_S
        reason: Exception | None = None
        while not chain.is_closing:
            has_learned = False
            for replica in chain.view.to_ask():
                try:
                    connection = self._ask(replica, ask_s)
                    if connection is not None:
                        return replica, connection
                except MovedAway as moved:
                    reason = moved
                    has_learned = chain.learn(moved.moved)
                    if has_learned:
                        break
                except (OSError, Broken, Refused) as error:
                    reason = error
            if time.monotonic() - began_s > timeout_s:
                break
            if not has_learned:
                time.sleep(RETRY_S)
                ask_s = min(2 * ask_s, LONGEST_ASK_S)
        raise chain.not_found(began_s, reason)

    def _ask(self, replica: int, timeout_s: float) -> Connection | None:
        """A connection, if this is the head; raises if it does not answer, or has moved."""
        chain = self._chain
        if replica != chain.view.head:
            chain.ask_epoch(replica, timeout_s)
            return None
        connection = chain.set_up(replica, timeout_s)
        if replica == chain.view.head:  # also after SETUP, which has the latest epoch
            return connection
        chain.drop(connection)
        return None
