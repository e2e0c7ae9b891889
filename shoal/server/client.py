"""A worker's side: what it pushes to and pulls from all servers of one model.

Requests of one connection are carried out in order by a thread of their own, beside the
computation; whoever needs the outcome waits for its future.

A TCP connection that breaks is made anew, and what was not answered on it is sent again: the
server has counted pushes, and passes over those that it has. A Unix socket ends with a process.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
import torch
from torch import Tensor

from shoal.errors import PeerLost, ShoalError
from shoal.server import shared_memory as shared
from shoal.server.lane import Lane as Thread
from shoal.server.model.shard import DTYPES, parts_of
from shoal.server.protocol.connection import CONNECT_S, Closed, Connection, connect
from shoal.server.protocol.frames import MOST_META_BYTES, Header, Kind, decode, encode
from shoal.server.protocol.handshake import RETURN_S, introduce
from shoal.server.protocol.messages import (
    Ack,
    Commit,
    Error,
    Lane,
    Meet,
    Message,
    Met,
    Norm,
    Norms,
    PartOf,
    Pull,
    Pulled,
    Spec,
    State,
    Stats,
)
from shoal.server.shared_memory import bytes_of

T = TypeVar("T")
START_S = 120.0
MOST_BREAKS = 100  # of a connection before one request is answered


class Broken(PeerLost):
    """A connection has ended in the middle of something."""


class Link:
    """The three connections of one worker to one server."""

    def __init__(self, place: PartOf, index: int, address: str, secret: bytes, header: Header):
        self.rank = place.rank(header.worker)
        self._place = place
        self.index = index
        self.address = address
        self._secret = secret
        self._header = header
        self._connections: dict[Lane, Connection] = {}
        self._threads: dict[Lane, Thread] = {}
        self.shares_memory = self._is_closing = False
        self._unanswered: dict[Lane, list[Callable[[], Any]]] = {}
        self._past: list[Connection] = []
        self._lost_for_good: PeerLost | None = None
        self.open("control")

    def open(self, lane: Lane) -> None:
        self._connections[lane] = self._connect(lane, START_S)
        self._threads[lane] = Thread(f"shoal-ps-{lane}-{self.index}")

    @property
    def is_unix(self) -> bool:
        return self._connections["control"].is_unix

    @property
    def sent_bytes(self) -> int:
        return sum(c.sent_bytes for c in (*self._connections.values(), *self._past))

    @property
    def received_bytes(self) -> int:
        return sum(c.received_bytes for c in (*self._connections.values(), *self._past))

    def later(self, lane: Lane, do: Callable[[], T], answered: bool = True) -> Future[T]:
        """`answered=False`: a later request's answer counts for this one, too."""
        return self._threads[lane].do(lambda: self.steadily(lane, do, answered))

    def steadily(self, lane: Lane, do: Callable[[], T], answered: bool = True) -> T:
        """Do it, over a new connection if the old one breaks; what came before it comes again."""
        kept = self._unanswered.setdefault(lane, [])
        todo: list[Callable[[], Any]] = [do]
        for left in reversed(range(MOST_BREAKS)):
            try:
                found = [action() for action in todo][-1]
                break
            except Broken as broken:
                if not left:
                    raise
                self._reopen(lane, broken)
                todo = [*kept, do]
        if answered:
            kept.clear()
        elif not self.is_unix:
            kept.append(do)
        return cast(T, found)

    def send(
        self, lane: Lane, kind: Kind, meta: bytes = b"", *payload: memoryview, **fields: int
    ) -> None:
        try:
            self._connections[lane].send(self._header._replace(kind=kind, **fields), meta, *payload)
        except Closed as error:
            with suppress(Closed):  # it may have said why
                self._next(lane, kind)
            raise self._lost(kind, error) from error

    def send_descriptor(self, kind: Kind, meta: bytes, handle: int) -> None:
        try:
            self._connections["control"].send_descriptor(
                self._header._replace(kind=kind), meta, handle
            )
        except Closed as error:
            raise self._lost(kind, error) from error

    def answer(self, lane: Lane, kind: Kind, into: Sequence[memoryview] = ()) -> bytes:
        """The metadata of the answer to a request of `kind`; its payload goes into `into`."""
        try:
            return self._take(lane, kind, into)
        except Closed as error:
            raise self._lost(kind, error) from error

    def answer_any(self, lane: Lane, kind: Kind) -> tuple[bytes, bytearray]:
        """Metadata and a payload of any length."""
        try:
            header, meta = self._next(lane, kind)
            payload = bytearray(header.payload_bytes)
            self._connections[lane].read_into(memoryview(payload))
            return meta, payload
        except Closed as error:
            raise self._lost(kind, error) from error

    def close(self) -> None:
        self._is_closing = True
        for connection in list(self._connections.values()):
            connection.cut()
        for thread in self._threads.values():
            thread.close()
        for connection in self._connections.values():
            connection.close()

    def _reopen(self, lane: Lane, broken: Broken) -> None:
        """Raises unless the server is there, and knows this worker still."""
        if self._lost_for_good is not None or self._is_closing or self.is_unix:
            raise self._lost_for_good or broken
        try:
            fresh = self._connect(lane, RETURN_S)
        except (ShoalError, OSError) as error:
            why = error.__cause__ or error
            self._lost_for_good = PeerLost(self.rank, None, f"{broken.doing}, and again ({why})")
            raise self._lost_for_good from broken
        old = self._connections[lane]
        self._connections[lane] = fresh
        self._past.append(old)
        old.close()
        if self._is_closing:
            fresh.cut()

    def _connect(self, lane: Lane, patience_s: float) -> Connection:
        """A server process may still be starting, on a host that is busy with starting workers."""
        start_s = time.monotonic()
        while True:
            try:
                return self._introduced(lane, patience_s)
            except (FileNotFoundError, ConnectionError, TimeoutError) as error:
                broken = isinstance(error, Closed) and self.address.startswith("unix:")
                after_s = round(time.monotonic() - start_s, 1)
                if broken or after_s > patience_s or self._is_closing:
                    doing = f"connecting to server {self.index} at {self.address} ({error})"
                    raise PeerLost(self.rank, None, doing, after_s) from error
            time.sleep(0.02)

    def _introduced(self, lane: Lane, patience_s: float) -> Connection:
        connection = connect(self.address, timeout_s=min(patience_s, CONNECT_S))
        try:
            connection.sock.settimeout(patience_s)
            introduce(connection, self._secret, lane, self._header)
            connection.sock.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection

    def _take(self, lane: Lane, kind: Kind, into: Sequence[memoryview]) -> bytes:
        header, meta = self._next(lane, kind)
        expected = sum(view.nbytes for view in into)
        if header.payload_bytes != expected:
            raise ShoalError(
                f"server {self.index} answered {kind.name} with {header.payload_bytes} bytes, "
                f"and {expected} were expected"
            )
        for view in into:
            self._connections[lane].read_into(view)
        return meta

    def _next(self, lane: Lane, kind: Kind) -> tuple[Header, bytes]:
        header, meta = self._connections[lane].receive(MOST_META_BYTES)
        if header.kind is Kind.ERROR:
            error = decode(meta, Error)
            doing = f"{kind.name.lower()} of server {self.index}"
            if error.lost is not None:
                raise PeerLost(self.rank, self._place.rank(error.lost), doing)
            raise ShoalError(f"rank {self.rank}, {doing}: {error.sentence}")
        return header, meta

    def _lost(self, kind: Kind, error: Exception) -> Broken:
        return Broken(self.rank, None, f"{kind.name.lower()} of server {self.index} ({error})")


@dataclass(frozen=True)
class Arrived:
    """What a pull has brought; the weights stand in the client's inbox."""

    version: int
    slowest: int | None
    fastest: int | None
    head: Tensor


class Client:
    """All servers of one model, from one worker. `specs` has one entry a server."""

    def __init__(
        self,
        rank: int,
        model: int,
        addresses: Sequence[str],
        secret: bytes,
        specs: Sequence[Spec],
    ):
        self.rank = rank
        self.specs = list(specs)
        first = self.specs[0]
        self.dtype = DTYPES[first.dtype]
        self.head_dtype = DTYPES[first.head_dtype]
        self.parts = parts_of(first)
        self.size = first.size
        self.sequence = self._met = 0
        self.first = 0  # the first worker that is left, as of the latest meeting
        self._settling: list[Future[Any]] = []
        header = Header(Kind.HELLO, rank, model, secrets.randbits(63))
        self.links: list[Link] = []
        self.laid_bytes = 0  # put into shared memory for servers to read
        self._handle: int | None = None
        try:
            for index, address in enumerate(addresses):
                self.links.append(Link(first.place, index, address, secret, header))
            self._make_memory()
            for link, spec in zip(self.links, self.specs, strict=True):
                self._join(link, spec)
        except BaseException:
            self.close()
            raise
        finally:
            self._close_handle()

    @property
    def shares_memory(self) -> bool:
        """Whether nothing but small messages travels to any server."""
        return all(link.shares_memory for link in self.links)

    def share_weights(self, tell: shared.Tell) -> bool:
        """Let the weights of all servers lie in memory that all workers see; all call it.

        From then on `inbox` is that memory, and nothing has to be copied there.
        """
        num_bytes = self.size * self.dtype.itemsize if self.shares_memory else None
        handle = shared.share(tell, self.rank, num_bytes)
        if handle is None:
            return False
        try:
            self.inbox = shared.attach_weights(handle, self.dtype, self.size)
            for link in self.links:
                link.send_descriptor(Kind.SHARE, b"", handle)
                link.answer("control", Kind.SHARE)
        finally:
            os.close(handle)
        return True

    # ------------------------------------------------------------------ pushing

    def push(self, run: slice) -> None:
        """These elements of `out` are final: send them to whoever holds them, in the background."""
        for link, spec in zip(self.links, self.specs, strict=True):
            start = max(run.start, spec.start)
            stop = min(run.stop, spec.stop)
            if start < stop and link.shares_memory:
                self.laid_bytes += (stop - start) * self.out.element_size()
            elif start < stop:
                self._later_push(link, spec, start, stop)

    def commit(
        self, commit: Commit, heads: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> Ack:
        """The push is whole: everybody has it, then the lead decides about it.

        `meanwhile` is what the lead may need before it answers.
        """
        self.stage(commit, heads)
        decided = self._later_commit(self.links[0], commit, heads)
        if meanwhile is not None:
            meanwhile()
        return decided.result()

    def stage(self, commit: Commit, heads: Tensor) -> None:
        """The push is whole: all servers that decide nothing have it when this returns."""
        self.sequence += 1
        for future in [self._later_commit(link, commit, heads) for link in self._followers]:
            future.result()

    def decide(self, commit: Commit, heads: Tensor) -> Ack:
        """What the lead says of the push that was staged."""
        return self._later_commit(self.links[0], commit, heads).result()

    @property
    def leads(self) -> bool:
        """Whether the first of these servers decides; else it is one of another part."""
        return self.specs[0].index == 0

    @property
    def _followers(self) -> list[Link]:
        return self.links[1:] if self.leads else self.links

    def settle(self, position: int) -> None:
        """Ask for the moment when nobody needs this push any more; `wait_settled` waits."""
        self._settling = [
            link.later("push", lambda link=link: self._settle(link, position))  # type: ignore[misc]
            for link in self._followers
        ]

    def wait_settled(self) -> None:
        for future in self._settling:
            future.result()
        self._settling = []

    def norms(self) -> dict[int, float]:
        """The norm of each parameter's gradient in the step that is being done, by its index."""
        found = decode(self.request(self.links[0], Kind.NORMS), Norms).values
        cuts = [cut.parameter for spec in self.specs for cut in spec.cuts]
        norms: dict[int, float] = {}
        for parameter, norm in zip(cuts, found, strict=True):
            norms[parameter] = math.hypot(norms[parameter], norm) if parameter in norms else norm
        return norms

    def set_norm(self, value: float) -> None:
        """The norm of the whole gradient, of which these servers hold a part."""
        self.request(self.links[0], Kind.NORM_SET, Norm(value))

    # ------------------------------------------------------------------ pulling

    def pull(self, step: int | None, version: int) -> list[Future[Arrived]]:
        """Ask all servers at once; the lead's answer comes first in the list."""
        request = encode(Pull(step, version))
        return [
            link.later("pull", lambda link=link, spec=spec: self._pull(link, spec, request))  # type: ignore[misc]
            for link, spec in zip(self.links, self.specs, strict=True)
        ]

    def get_state(self) -> list[tuple[State, list[Tensor]]]:
        """The optimizer state of every server."""
        futures = [link.later("pull", lambda link=link: _get_state(link)) for link in self.links]  # type: ignore[misc]
        return [future.result() for future in futures]

    def set_state(self, states: Sequence[tuple[State, list[Tensor]]], weights: Tensor) -> None:
        """Give every server the weights and its part of the optimizer state."""
        futures = []
        for link, spec, (state, tensors) in zip(self.links, self.specs, states, strict=True):
            payload = [bytes_of(weights[spec.start : spec.stop]), *map(bytes_of, tensors)]

            def do(link: Link = link, state: State = state, parts: Any = tuple(payload)) -> bytes:
                link.send("pull", Kind.STATE_SET, encode(state), *parts)
                return link.answer("pull", Kind.STATE_SET)

            futures.append(link.later("pull", do))
        for future in futures:
            future.result()

    # ------------------------------------------------------------------ around it

    def meet(self) -> None:
        """Wait for all live workers, at the lead; then all of them know the same `first`."""
        self._met += 1
        self.first = decode(self.request(self.links[0], Kind.MEET, Meet(self._met)), Met).first

    def stats(self, final: bool = False) -> list[dict[str, Any]]:
        """The counts of every server; with `final`, when all workers are done."""
        return [
            msgspec.msgpack.decode(self.request(link, Kind.STATS, Stats(final)))
            for link in self.links
        ]

    def leave(self) -> None:
        for link in reversed(self.links):  # the lead last: it decides until then
            self.first = decode(self.request(link, Kind.LEAVE), Met).first

    def request(self, link: Link, kind: Kind, message: Message | None = None) -> bytes:
        def do() -> bytes:
            link.send("control", kind, b"" if message is None else encode(message))
            return link.answer("control", kind)

        return link.steadily("control", do)

    def close(self) -> None:
        for link in self.links:
            link.close()

    # ------------------------------------------------------------------ one server

    def _make_memory(self) -> None:
        made = None
        if any(link.is_unix for link in self.links):
            made = shared.make(self.dtype, self.size, self.parts)
        if made is not None:
            memory, self._handle = made
            self.out = memory.out
            self.inbox = memory.inbox
        else:
            self.out = torch.zeros(self.parts, self.size, dtype=self.dtype)
            self.inbox = torch.zeros(self.size, dtype=self.dtype)

    def _close_handle(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _join(self, link: Link, spec: Spec) -> None:
        link.shares_memory = self._handle is not None and link.is_unix
        if self._handle is not None and link.is_unix:
            link.send_descriptor(Kind.SETUP, encode(spec), self._handle)
            link.answer("control", Kind.SETUP)
        else:
            self.request(link, Kind.SETUP, spec)
        link.open("push")
        link.open("pull")

    def _later_push(self, link: Link, spec: Spec, start: int, stop: int) -> None:
        width = self.dtype.itemsize
        sequence = self.sequence + 1
        for part in range(self.parts):
            at = (part * (spec.stop - spec.start) + start - spec.start) * width
            payload = bytes_of(self.out[part, start:stop])

            def do(at: int = at, payload: memoryview = payload) -> None:
                link.send("push", Kind.BUCKET, b"", payload, sequence=sequence, argument=at)

            link.later("push", do, answered=False)

    def _later_commit(self, link: Link, commit: Commit, heads: Tensor) -> Future[Ack]:
        meta = encode(commit)
        payload = bytes_of(heads)
        sequence = self.sequence

        def do() -> Ack:
            link.send("push", Kind.COMMIT, meta, payload, sequence=sequence)
            return decode(link.answer("push", Kind.COMMIT), Ack)

        return link.later("push", do)

    def _settle(self, link: Link, position: int) -> None:
        link.send("push", Kind.SETTLE, argument=position)
        link.answer("push", Kind.SETTLE)

    def _pull(self, link: Link, spec: Spec, request: bytes) -> Arrived:
        head = torch.empty(1 + spec.parameters, dtype=self.head_dtype)
        into = [bytes_of(head)]
        if not link.shares_memory:
            into.append(bytes_of(self.inbox[spec.start : spec.stop]))
        link.send("pull", Kind.PULL, request)
        found = decode(link.answer("pull", Kind.PULL, into), Pulled)
        return Arrived(found.version, found.slowest, found.fastest, head)


def _get_state(link: Link) -> tuple[State, list[Tensor]]:
    link.send("pull", Kind.STATE_GET)
    meta, payload = link.answer_any("pull", Kind.STATE_GET)
    state = decode(meta, State)
    tensors = []
    at = 0
    flat = torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0)
    for value in state.tensors:
        dtype = DTYPES[value.dtype]
        end = at + math.prod(value.shape) * dtype.itemsize
        tensors.append(flat[at:end].clone().view(dtype).reshape(value.shape))
        at = end
    return state, tensors
