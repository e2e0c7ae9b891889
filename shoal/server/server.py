"""Serves connections: a thread each, every frame checked before anything follows from it.

A worker has three connections to a server, so that nothing waits behind bulk data or behind a
pull that has to wait for others: control (joining, meeting, leaving, counts), push and pull.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from shoal.errors import BadInput
from shoal.server.handlers.compressed import PackedRequests
from shoal.server.handlers.rows import RowRequests
from shoal.server.model.served_model import Holding, Lost, Member, Occupant
from shoal.server.model.shard import DTYPES, check_spec, parts_of
from shoal.server.protocol.connection import Closed, Connection, Listener
from shoal.server.protocol.frames import MOST_META_BYTES, Header, Kind, Refused, decode, encode
from shoal.server.protocol.handshake import HANDSHAKE_S, RETURN_S, greet
from shoal.server.protocol.messages import (
    Commit,
    Error,
    Hello,
    Meet,
    Met,
    Norm,
    Norms,
    Pull,
    Spec,
    State,
    Stats,
)
from shoal.server.replication import Followers, follow
from shoal.server.shared_memory import attach, bytes_of

MOST_STRANGERS = 64  # connections that have not proven the secret
MOST_MODELS = 64
MOST_REASONS = 64
_SMALL_META_BYTES = 64 << 10
_WITH_PAYLOAD = (
    *(Kind.BUCKET, Kind.PACKED, Kind.KEEP, Kind.COMMIT, Kind.STATE_SET),
    *(Kind.TABLE_PULL, Kind.TABLE_PUSH, Kind.TABLE_SET),
)
_JOIN_S = 5.0


class Server:
    """Listens, and holds what workers ask it to hold."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        most_bytes: int | None = None,
        is_gone: Callable[[int], bool] | None = None,
        beyond: str = "",
    ):
        """`is_gone(worker)` says of one that has not joined that it never will.

        `beyond` is another address to listen at, for those who are not on this host.
        """
        self.secret = secret
        self.most_bytes = most_bytes or _memory_bytes()
        self.is_gone = is_gone
        self.listeners = [Listener(address)]
        self.address = self.listeners[0].address
        self.beyond = ""
        if beyond:
            try:
                self.listeners.append(Listener(beyond))
            except BaseException:
                self.listeners[0].close()
                raise
            self.beyond = self.listeners[1].address
        self.models: dict[int, Holding] = {}
        self._being_made: set[int] = set()
        self.followers: dict[int, Followers] = {}
        self.refused: Counter[str] = Counter()
        self.changed = threading.Condition()
        self.requests = self.received_bytes = self.sent_bytes = 0
        self._numbers = itertools.count()
        self._strangers: dict[int, tuple[float, socket.socket]] = {}
        self._connections: set[Connection] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._accepting = [
            threading.Thread(
                target=self._accept, args=(listener,), name="shoal-server", daemon=True
            )
            for listener in self.listeners
        ]
        for thread in self._accepting:
            thread.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Until every worker of every model has left, or died."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.models, timeout_s)

    def close(self) -> None:
        with self.changed:
            self._closed = True
            connections = list(self._connections)
            strangers = [sock for _, sock in self._strangers.values()]
            threads = list(self._threads)
        for listener in self.listeners:
            listener.close()
        for holding in list(self.models.values()):
            holding.fail("the server has been stopped")
        for connection in connections:
            connection.cut()
        for sock in strangers:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in [*self._accepting, *threads]:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def report(self) -> dict[str, Any]:
        """Counts of the whole server."""
        with self.changed:
            live = list(self._connections)
            return {
                "requests": self.requests + sum(c.requests for c in live),
                "received_bytes": self.received_bytes + sum(c.received_bytes for c in live),
                "sent_bytes": self.sent_bytes + sum(c.sent_bytes for c in live),
                "refused": dict(self.refused),
            }

    # ------------------------------------------------------------------ connections

    def _accept(self, listener: Listener) -> None:
        while (sock := listener.accept()) is not None:
            with self.changed:
                if self._closed:
                    sock.close()
                    return
                self._make_room()
                self._strangers[id(sock)] = (time.monotonic(), sock)
                thread = threading.Thread(
                    target=self._serve,
                    args=(listener, sock, next(self._numbers)),
                    name="shoal-serve",
                    daemon=True,
                )
                self._threads.add(thread)
            thread.start()

    def _make_room(self) -> None:
        """The stranger that has been silent for longest goes when there are too many."""
        if len(self._strangers) < MOST_STRANGERS:
            return
        key = min(self._strangers, key=lambda k: self._strangers[k][0])
        _, sock = self._strangers.pop(key)
        self._count("too many strangers")
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _serve(self, listener: Listener, sock: socket.socket, number: int) -> None:
        connection: Connection | None = None
        try:
            sock.settimeout(HANDSHAKE_S)
            connection = Connection(listener.secure(sock))
            with self.changed:
                if id(sock) in self._strangers:
                    self._strangers[id(sock)] = (time.monotonic(), connection.sock)
            hello, header = greet(connection, self.secret)
            connection.sock.settimeout(None)
            with self.changed:
                self._strangers.pop(id(sock), None)
                self._connections.add(connection)
                if self._closed:
                    return
            Session(self, connection, hello, header, number).run()
        except Refused as error:
            self._refuse(connection, error)
        except (OSError, TimeoutError):
            self._count("silent or broken before hello")
        finally:
            self._forget(sock, connection)

    def _refuse(self, connection: Connection | None, error: Refused) -> None:
        self._count(str(error))
        if connection is not None:
            with suppress(Closed, OSError):
                connection.send(Header(Kind.ERROR), encode(Error(str(error)[:4000])))

    def _count(self, reason: str) -> None:
        """By kinds, of which there are few, whatever strangers think of."""
        kind = re.sub(r"[0-9]+", "#", reason)[:80]
        known = kind in self.refused or len(self.refused) < MOST_REASONS
        self.refused[kind if known else "others"] += 1

    def _forget(self, sock: socket.socket, connection: Connection | None) -> None:
        with self.changed:
            self._strangers.pop(id(sock), None)
            if connection is not None:
                self._connections.discard(connection)
                self.requests += connection.requests
                self.received_bytes += connection.received_bytes
                self.sent_bytes += connection.sent_bytes
            self._threads.discard(threading.current_thread())
        if connection is not None:
            connection.close()
        sock.close()

    # ------------------------------------------------------------------ models

    def hold(self, model: int, spec: Spec) -> Holding:
        """The holding of a model; made when its first worker comes."""
        with self.changed:
            self.changed.wait_for(lambda: model not in self._being_made)
            found = self.models.get(model)
            if found is not None:
                if found.spec != spec:
                    raise Refused("the workers of one model do not describe it alike")
                return found
            if len(self.models) + len(self._being_made) >= MOST_MODELS:
                raise Refused(f"this server holds {MOST_MODELS} models already")
            check_spec(spec, self.most_bytes)
            self._being_made.add(model)
        try:
            return self._make(model, spec)
        finally:
            with self.changed:
                self._being_made.discard(model)
                self.changed.notify_all()

    def _make(self, model: int, spec: Spec) -> Holding:
        """Not under the lock: the lead that it follows may be this server, for another part."""
        try:
            holding = Holding(spec)
        except (BadInput, RuntimeError) as error:
            raise Refused(str(error)) from error
        is_gone = self.is_gone
        if is_gone is not None:
            holding.is_gone = lambda worker: is_gone(spec.place.rank(worker))
        following = None
        if spec.index > 0:
            followed = model if spec.place.follows is None else spec.place.follows
            following = follow(holding, followed, self.secret)
        with self.changed:
            if following is not None:
                self._threads.add(following[0])
                self._connections.add(following[1])
            elif spec.servers > 1:
                self.followers[model] = Followers(holding)
            self.models[model] = holding
        return holding

    def drop(self, model: int) -> None:
        """Nobody works on it any more."""
        with self.changed:
            holding = self.models.get(model)
            if holding is None or any(m.lanes for m in holding.members.values()):
                return
            if not holding.is_over:
                return
            del self.models[model]
            followers = self.followers.pop(model, None)
            self.changed.notify_all()
        if followers is not None:
            followers.close()


class Session:
    """One connection of one worker, from its hello to its end."""

    def __init__(
        self, server: Server, connection: Connection, hello: Hello, header: Header, number: int
    ):
        self.server = server
        self.connection = connection
        self.lane = hello.lane
        self.worker = header.worker
        self.incarnation = header.incarnation
        self.model = header.model
        self.holding: Holding | None = None
        self.member: Member | None = None
        self._occupant = Occupant(threading.get_ident(), connection.cut, number)
        self._was_cut = self._is_back = False
        self._rows = RowRequests(connection, self._here, self._answer)
        self._packed = PackedRequests(connection, self._here, self._answer)
        self._handlers = self._table()[self.lane]

    def _table(self) -> dict[str, dict[Kind, Callable[[Header, bytes], None]]]:
        """Which messages count on which connection."""
        return {
            "control": {
                Kind.SETUP: self._setup,
                Kind.SHARE: self._share,
                Kind.MEET: self._meet,
                Kind.STATS: self._stats,
                Kind.LEAVE: self._leave,
                Kind.NORMS: self._norms,
                Kind.NORM_SET: self._norm_set,
            },
            "push": {
                Kind.BUCKET: self._bucket,
                Kind.PACKED: self._packed.push,
                Kind.KEEP: self._packed.keep,
                Kind.COMMIT: self._commit,
                Kind.SETTLE: self._settle,
                Kind.TABLE_PUSH: self._rows.push,
            },
            "pull": {
                Kind.PULL: self._pull,
                Kind.KEPT: self._packed.kept,
                Kind.STATE_GET: self._state_get,
                Kind.STATE_SET: self._state_set,
            },
            "rows": {
                Kind.TABLE_MAKE: self._rows.make,
                Kind.TABLE_PULL: self._rows.pull,
                Kind.TABLE_GET: self._rows.get,
                Kind.TABLE_SET: self._rows.set,
            },
            "follow": {Kind.FOLLOW: self._follow},
        }

    def run(self) -> None:
        try:
            if self.lane in ("push", "pull", "rows"):
                self._enter(self._known())
            elif self.lane == "control" and self._has_joined():
                self._is_back = True
                self._enter(self._known())
            while True:
                most = MOST_META_BYTES if self._takes_long_meta() else _SMALL_META_BYTES
                header, meta = self.connection.receive(most)
                self._check(header)
                try:
                    self._handlers[header.kind](header, meta)
                except Lost as lost:
                    self._answer(Kind.ERROR, encode(Error(lost.sentence, lost.worker)))
        except Closed:
            self._was_cut = True
        except Refused:
            raise
        except BadInput as error:
            raise Refused(str(error)) from error
        except Exception as error:  # in an optimizer, say: nobody shall wait for its update
            if self.holding is not None:
                self.holding.fail(f"server {self.holding.spec.index} failed: {error!r}"[:4000])
            raise Refused(f"the server failed: {error!r}"[:4000]) from error
        finally:
            self._end()

    def _check(self, header: Header) -> None:
        if header.kind not in self._handlers:
            raise Refused(f"{header.kind.name} is no message for a {self.lane} connection")
        if (header.worker, header.incarnation) != (self.worker, self.incarnation):
            raise Refused(f"worker {self.worker} speaks for worker {header.worker}")
        if header.model != self.model or header.epoch:
            raise Refused("a frame of another model or epoch")
        if header.payload_bytes and header.kind not in _WITH_PAYLOAD:
            raise Refused(f"{header.kind.name} has no payload")

    def _takes_long_meta(self) -> bool:
        """Descriptions of a model and of its state; everything else is short."""
        before = self.member is None or self._is_back
        return self.lane == "pull" or (self.lane == "control" and before)

    def _has_joined(self) -> bool:
        holding = self.server.models.get(self.model)
        member = None if holding is None else holding.members.get(self.worker)
        return member is not None and member.incarnation == self.incarnation

    def _known(self) -> Holding:
        if not self._has_joined():
            raise Refused(f"worker {self.worker} has not joined this model")
        return self.server.models[self.model]

    def _enter(self, holding: Holding) -> None:
        member = holding.members[self.worker]
        with holding.changed:
            while (held := member.lanes.get(self.lane)) is not None:
                self._displace(holding, member, held)
            self.holding = holding
            self.member = member
            member.lanes[self.lane] = self._occupant
            if self.lane == "push" and member.consumed == member.watermark:
                member.rows.clear()  # a push that was begun comes again from its start
            holding.changed.notify_all()

    def _displace(self, holding: Holding, member: Member, held: Occupant) -> None:
        """The worker has connected anew; the old connection may not have noticed its end.

        Nothing of the old one may go on beside the new one. Several may be waiting to follow it,
        all but the last of which have broken meanwhile. A Unix socket does not break.
        """
        if held.number > self._occupant.number:
            raise Closed("the worker has connected anew")
        if not self.connection.is_unix:
            holding.displaced.add(held.thread)
            held.cut()
            holding.changed.notify_all()
            holding.changed.wait_for(lambda: member.lanes.get(self.lane) is not held, RETURN_S)
        if member.lanes.get(self.lane) is held:
            raise Refused(f"worker {self.worker} has a {self.lane} connection already")

    def _end(self) -> None:
        if self.member is None or self.holding is None:
            return
        if self._leaves_lane(self.holding, self.member):
            self.holding.lose(self.worker)
        self.holding.miss_absent()
        self.server.drop(self.model)

    def _leaves_lane(self, holding: Holding, member: Member) -> bool:
        """Give up this connection; False when the worker comes back on another one.

        A broken Unix socket is the end of a process. A TCP connection may break by itself.
        """
        with holding.changed:
            if member.lanes.get(self.lane) is self._occupant:
                del member.lanes[self.lane]
            holding.displaced.discard(self._occupant.thread)
            holding.changed.notify_all()
            if not self._was_cut or self.connection.is_unix:
                return True
            self.connection.cut()

            def is_decided() -> bool:
                over = holding.failure is not None or self.worker in holding.gone
                return over or self.lane in member.lanes

            holding.changed.wait_for(is_decided, RETURN_S)
            return self.lane not in member.lanes

    def _here(self) -> tuple[Holding, Member]:
        if self.holding is None or self.member is None:
            raise Refused(f"worker {self.worker} has not joined this model")
        return self.holding, self.member

    def _answer(self, kind: Kind, meta: bytes = b"", *payload: memoryview) -> None:
        self.connection.send(Header(kind, self.worker, self.model), meta, *payload)

    # ------------------------------------------------------------------ control

    def _setup(self, header: Header, meta: bytes) -> None:
        if self._is_back and self.holding is not None:  # the answer was lost
            if decode(meta, Spec) != self.holding.spec:
                raise Refused("the workers of one model do not describe it alike")
            self._answer(Kind.OK)
            return
        if self.member is not None:
            raise Refused(f"worker {self.worker} has joined before")
        handle = self.connection.take_descriptor()
        try:
            spec = decode(meta, Spec)
            holding = self.server.hold(self.model, spec)
            segment = None
            if handle is not None:
                segment = attach(handle, DTYPES[spec.dtype], spec.size, parts_of(spec))
            holding.join(self.worker, self.incarnation, segment)
        finally:
            if handle is not None:
                os.close(handle)
        self._enter(holding)
        self._answer(Kind.OK)

    def _share(self, header: Header, meta: bytes) -> None:
        holding, _ = self._here()
        handle = self.connection.take_descriptor()
        if handle is None:
            raise Refused("no memory came with SHARE")
        try:
            holding.share(self.worker, handle)
        finally:
            os.close(handle)
        self._answer(Kind.OK)

    def _meet(self, header: Header, meta: bytes) -> None:
        holding, _ = self._here()
        first = holding.meet(self.worker, decode(meta, Meet).number)
        self._answer(Kind.OK, encode(Met(first)))

    def _stats(self, header: Header, meta: bytes) -> None:
        holding, _ = self._here()
        if decode(meta, Stats).final:
            holding.wait_over()
        found = {**holding.report(), **self.server.report()}
        self._answer(Kind.OK, msgspec.msgpack.encode(found))

    def _leave(self, header: Header, meta: bytes) -> None:
        holding, _ = self._here()
        holding.leave(self.worker)
        self._answer(Kind.OK, encode(Met(holding.first)))

    def _norms(self, header: Header, meta: bytes) -> None:
        holding, _ = self._here()
        self._answer(Kind.OK, encode(Norms(tuple(holding.norms(self.worker)))))

    def _norm_set(self, header: Header, meta: bytes) -> None:
        holding, _ = self._here()
        holding.set_norm(decode(meta, Norm).value)
        self._answer(Kind.OK)

    # ------------------------------------------------------------------ push

    def _bucket(self, header: Header, meta: bytes) -> None:
        """Part of a push, into the memory that waits for it; no answer."""
        holding, member = self._here()
        start = header.argument
        count = header.payload_bytes
        width = holding.shard.dtype.itemsize
        staged = bytes_of(member.staged)
        if member.inbox is not None:
            raise Refused("gradients over the wire from a worker that shares its memory")
        if holding.packing is not None:
            raise Refused("gradients in full where they are to come compressed")
        if start % width or count % width or start + count > staged.nbytes:
            raise Refused(f"{count} bytes at {start} do not fit {staged.nbytes} bytes of gradients")
        if header.sequence <= member.watermark:
            self.connection.pass_over(count)
            return
        holding.expect(member, header.sequence)
        self.connection.read_into(staged[start : start + count])

    def _commit(self, header: Header, meta: bytes) -> None:
        holding, member = self._here()
        commit = decode(meta, Commit)
        heads = bytes_of(member.heads)
        if header.payload_bytes != heads.nbytes:
            raise Refused(f"{header.payload_bytes} bytes of heads, and {heads.nbytes} fit")
        if header.sequence <= member.watermark:
            self.connection.pass_over(heads.nbytes)
        else:
            holding.expect(member, header.sequence)
            self.connection.read_into(heads)
        ack = holding.commit(self.worker, header.sequence, commit)
        self._answer(Kind.OK, encode(ack))

    def _settle(self, header: Header, meta: bytes) -> None:
        holding, _ = self._here()
        holding.settle(self.worker, header.argument)
        self._answer(Kind.OK)

    # ------------------------------------------------------------------ pull

    def _pull(self, header: Header, meta: bytes) -> None:
        holding, _ = self._here()
        pulled, head, weights = holding.pull(self.worker, decode(meta, Pull))
        payload = [bytes_of(head)] if weights is None else [bytes_of(head), bytes_of(weights)]
        self._answer(Kind.OK, encode(pulled), *payload)

    def _state_get(self, header: Header, meta: bytes) -> None:
        holding, _ = self._here()
        state, tensors = holding.state()
        self._answer(Kind.OK, encode(state), *map(bytes_of, tensors))

    def _state_set(self, header: Header, meta: bytes) -> None:
        holding, _ = self._here()
        state = decode(meta, State)
        if header.payload_bytes != holding.shard.check_state(state):
            raise Refused(f"{header.payload_bytes} bytes are not what the state says")
        payload = bytearray(header.payload_bytes)
        self.connection.read_into(memoryview(payload))
        try:
            holding.restore(state, payload)
        except (ValueError, TypeError, RuntimeError, KeyError) as error:
            raise Refused(f"the optimizer refuses this state: {error}") from error
        self._answer(Kind.OK)

    # ------------------------------------------------------------------ other servers

    def _follow(self, header: Header, meta: bytes) -> None:
        followers = self.server.followers.get(self.model)
        if followers is None:
            raise Refused("this server does not lead that model")
        self._answer(Kind.OK)
        followers.serve(header.argument, self.connection)
        raise Closed("the model is done with")


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return sys.maxsize
