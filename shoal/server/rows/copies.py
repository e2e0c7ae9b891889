"""Hot rows on their way from the server that owns them to all others.

reader ── FOLLOW_ROWS ────────────────────────────> owner
owner  ── COPIED_ROWS table, number, version, … ──> reader    what has changed since the last

An owner sends after every update, and several updates at once to a reader that is slow. A reader
that has version v of an owner has all its hot rows as of v. Where a connection breaks, copies of
that owner are not used until the next set of hot rows is chosen.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from shoal.errors import ShoalError
from shoal.runtime import clock
from shoal.runtime.config import TlsConfig
from shoal.server.messages import CopiedRows
from shoal.server.model.hot_table import NO_VERSION, RowChanges
from shoal.server.model.served_model import ServedModel
from shoal.server.protocol import FrameKind, Header, Refused, decode, encode
from shoal.server.protocol.connection import Closed, Connection
from shoal.server.protocol.handshake import dial
from shoal.server.shared_memory import bytes_of

_CONNECT_S = 5.0
_MAX_META_BYTES = 8192
_JOIN_S = 5.0


class RowCopies:
    """The copies of one model on one server: what it sends, and what it reads.

    A thread for each owner installs its hot rows while the connection lasts.
    """

    def __init__(self, model: ServedModel, model_id: int, secret: bytes, tls: TlsConfig):
        self._model = model
        self._model_id = model_id
        self._secret = secret
        self._tls = tls
        self._reading: dict[int, tuple[Connection, threading.Thread]] = {}  # by owner
        self._making = clock.Lock()
        self._closed = False

    def follow(self, addresses: Sequence[str]) -> None:
        """Read the hot rows of all other servers."""
        with self._making:
            for owner, address in enumerate(addresses):
                is_here = owner == self._model.spec.index
                if is_here or self._closed or owner in self._reading:
                    continue
                with suppress(OSError, ShoalError):  # its rows are not copied until the next set
                    connection = self._subscribe(address)
                    name = f"shoal-copies-{owner}"
                    args = (owner, connection)
                    thread = clock.Thread(target=self._read, args=args, name=name, daemon=True)
                    self._reading[owner] = connection, thread
                    thread.start()

    def _subscribe(self, address: str) -> Connection:
        index = self._model.spec.index
        header = Header(FrameKind.HELLO, index, self._model_id, secrets.randbits(63))
        connection = dial(address, self._secret, "follow", header, self._tls, _CONNECT_S)
        try:
            connection.send(header._replace(kind=FrameKind.FOLLOW_ROWS))
            connection.sock.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection

    def _read(self, owner: int, connection: Connection) -> None:
        tables = self._model.tables
        lock = self._model.lock
        try:
            while True:
                header, meta = connection.receive(_MAX_META_BYTES)
                if header.kind is not FrameKind.COPIED_ROWS:
                    raise Refused(f"expected COPIED_ROWS, got {header.kind.name}")
                copied = decode(meta, CopiedRows)
                dim = tables.table(copied.table).spec.dim
                if header.payload_bytes != copied.count * (8 + 4 * dim):
                    raise Refused(f"{header.payload_bytes} bytes for {copied.count} rows")
                ids = torch.empty(copied.count, dtype=torch.int64)
                rows = torch.empty(copied.count, dim)
                connection.read_into(bytes_of(ids))
                connection.read_into(bytes_of(rows))
                with lock:
                    changes = RowChanges(copied.number, copied.version, ids, rows)
                    tables.hot[copied.table].install(owner, changes)
                    lock.notify_all()
        except (Closed, ShoalError, OSError):
            pass  # the owner is asked for its rows
        finally:
            with lock:
                self._reading.pop(owner, None)
                for hot in tables.hot.values():
                    hot.lose(owner)
                lock.notify_all()
            connection.close()

    def serve(self, index: int, connection: Connection) -> None:
        """Send the hot rows of this server until the model is released."""
        spec = self._model.spec
        if index >= spec.servers or index == spec.index:
            raise Refused(f"server {index} is not expected here")
        sent: dict[str, tuple[int, int]] = {}  # by table: the set, and the version
        tables = self._model.tables

        def news() -> list[str]:
            now = {name: (hot.number, self._model.version) for name, hot in tables.hot.items()}
            return [n for n in now if tables.hot[n].is_published and sent.get(n) != now[n]]

        while True:
            with self._model.lock:
                self._model.lock.wait_for(lambda: self._closed or bool(news()))
                if self._closed:
                    return
                changes: dict[str, RowChanges] = {}
                for name in news():
                    before = sent.get(name, (0, NO_VERSION))
                    each = tables.hot[name].changes(before, self._model.version)
                    changes[name] = each
                    sent[name] = (each.number, each.version)
            for name, each in changes.items():
                meta = encode(CopiedRows(name, each.number, each.version, len(each.ids)))
                connection.send(
                    Header(FrameKind.COPIED_ROWS), meta, bytes_of(each.ids), bytes_of(each.rows)
                )

    def close(self) -> None:
        with self._model.lock:
            self._closed = True
            self._model.lock.notify_all()
        for connection, thread in list(self._reading.values()):
            connection.abort()
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
