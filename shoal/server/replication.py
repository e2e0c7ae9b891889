"""How the lead's decisions reach the other servers, and how all of them agree on clipping."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence

from shoal.server.model.served_model import Holding, Lost
from shoal.server.protocol.connection import Closed, Connection, connect
from shoal.server.protocol.frames import Header, Kind, Refused, decode, encode
from shoal.server.protocol.handshake import introduce
from shoal.server.protocol.messages import Entry, Error, Factor, Norms

_MOST_NORMS_BYTES = 32 << 20


class Followers:
    """The lead's side: connections of the other servers, in their order."""

    def __init__(self, holding: Holding):
        self.holding = holding
        self._connections: dict[int, Connection] = {}
        self._changed = threading.Condition()
        self._closed = False
        holding.tell = self._tell
        holding.agree = self._agree

    def serve(self, index: int, connection: Connection) -> None:
        """Keep the connection of server `index` until the model is done with."""
        with self._changed:
            if not 0 < index < self.holding.spec.servers or index in self._connections:
                raise Refused(f"server {index} is not expected here")
            self._connections[index] = connection
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _tell(self, entry: Entry) -> None:
        for index in self._everybody():
            self._send(index, Kind.ENTRY, encode(entry))

    def _agree(self, norms: Sequence[float], bound: float) -> float:
        everything = list(norms)
        for index in self._everybody():
            everything += self._receive_norms(index)
        factor = self.holding.factor(everything, bound)
        for index in self._everybody():
            self._send(index, Kind.OK, encode(Factor(factor)))
        return factor

    def _everybody(self) -> list[int]:
        wanted = self.holding.spec.servers - 1
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._connections) == wanted, 30.0):
                raise self._lost("another server has not come")
            return sorted(self._connections)

    def _send(self, index: int, kind: Kind, meta: bytes) -> None:
        try:
            self._connections[index].send(Header(kind), meta)
        except Closed as error:
            raise self._lost(f"server {index} has gone ({error})") from error

    def _receive_norms(self, index: int) -> tuple[float, ...]:
        try:
            header, meta = self._connections[index].receive(_MOST_NORMS_BYTES)
            if header.kind is not Kind.NORMS or header.payload_bytes:
                raise Refused("no norms")
            return decode(meta, Norms).values
        except (Closed, Refused) as error:
            raise self._lost(f"server {index} has gone ({error})") from error

    def _lost(self, sentence: str) -> Lost:
        self.holding.failure = self.holding.failure or Lost(sentence, None)
        return self.holding.failure


def follow(holding: Holding, model: int, secret: bytes) -> tuple[threading.Thread, Connection]:
    """Carry out the lead's decisions, in a thread, for as long as the lead is there."""
    index = holding.spec.index
    connection = connect(holding.spec.lead)
    header = Header(Kind.HELLO, index, model, secrets.randbits(63))
    try:
        introduce(connection, secret, "follow", header)
        connection.send(header._replace(kind=Kind.FOLLOW, argument=index))
        answer, meta = connection.receive(8192)
        if answer.kind is Kind.ERROR:
            raise Refused(decode(meta, Error).sentence)
    except Exception:
        connection.close()
        raise

    def agree(norms: Sequence[float], bound: float) -> float:
        connection.send(Header(Kind.NORMS), encode(Norms(tuple(norms))))
        found, meta = connection.receive(8192)
        if found.kind is not Kind.OK:
            raise Refused("the lead gave no factor")
        return decode(meta, Factor).value

    def run() -> None:
        try:
            while True:
                found, meta = connection.receive(8192)
                if found.kind is not Kind.ENTRY or found.payload_bytes:
                    raise Refused("the lead sent no entry of its log")
                holding.replay(decode(meta, Entry))
        except (Closed, Refused) as error:
            if not holding.is_over:
                holding.fail(f"the lead server has gone ({error})")
        except Exception as error:
            holding.fail(f"server {index} failed: {error!r}"[:4000])
        finally:
            connection.close()

    holding.agree = agree
    thread = threading.Thread(target=run, name=f"shoal-follow-{index}", daemon=True)
    thread.start()
    return thread, connection
