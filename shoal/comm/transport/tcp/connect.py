"""The connections of all pairs of ranks: every rank listens, the higher rank of a pair connects.

Each accepted connection has its own thread until it has proven the key, so one that says nothing
holds up no other. What does not prove the key is closed and does not count. Where many connections
have not proven it, newcomers wait a moment, and then the oldest of those is ended for each.

The handshake is that of `runtime/secret.py`; the claim is both ranks and the stream. The key is
drawn from the secret of the run and from what rank 0 drew for this start. Under TLS the certificate
of who accepts is proven, too.
"""

from __future__ import annotations

import resource
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.comm.transport.tcp import tls
from shoal.errors import BadInput, PeerLost, ShoalError
from shoal.runtime.acceptor import GRACE_S, Acceptor, Greeter, Strangers, notice_silence
from shoal.runtime.config import TlsConfig
from shoal.runtime.secret import Greeting, Stranger
from shoal.runtime.waits import Backoff

_OTHERS = 512  # files, pipes, servers, connections of strangers that have not proven a key


def require_open_files(connections: int) -> None:
    """Raise the soft limit of this process where they need it; BadInput beyond the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHERS
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise BadInput(
            f"{connections} connections to other ranks need {needed} open files, and this process "
            f"may have {hard}: raise the limit with ulimit -n {needed}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


HANDSHAKE_S = 10.0
_MAGIC = b"shoaltcp"
_HELLO = struct.Struct("<III")  # source rank, target rank, stream


class StreamName(NamedTuple):
    """Which connection of which pair: `source` connects to `target`."""

    source: int
    target: int
    stream: int


def prove(sock: socket.socket, key: bytes, name: StreamName, certificate: bytes = b"") -> None:
    """The side that connects; Stranger if the other one does not prove the key as well."""
    Greeting(key, _MAGIC, certificate).connect(sock, _HELLO.pack(*name), HANDSHAKE_S)


def accept(sock: socket.socket, key: bytes, certificate: bytes = b"") -> StreamName:
    """The side that accepts: which stream this is."""
    greeting = Greeting(key, _MAGIC, certificate)
    claim = greeting.admit(sock, _HELLO.size, HANDSHAKE_S)
    sock.sendall(greeting.welcome)
    return StreamName(*_HELLO.unpack(claim))


_MOST_BYTES = 300


class Announcement(NamedTuple):
    """Where a rank listens, and how."""

    host: str
    port: int
    is_tls: bool
    flaw: str = ""

    def pack(self) -> bytes:
        kind = "tls" if self.is_tls else "plain"
        return f"{self.host} {self.port} {kind} {self.flaw}".strip().encode()[:_MOST_BYTES]

    @classmethod
    def parse(cls, text: bytes) -> Announcement:
        words = text[:_MOST_BYTES].decode(errors="replace").split(" ", 3)
        host, port, kind, flaw = [*words, *[""] * (4 - len(words))]
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ShoalError(f"a rank wrote {text[:60]!r} for its address into the rendezvous")
        printable = "".join(char if char.isprintable() else " " for char in flaw)
        return cls(host, int(port), kind == "tls", printable)


def check_tls(rank: int, said: Mapping[int, Announcement]) -> None:
    """BadInput, on all ranks, where files of TLS do not serve. `said` is by rank, with this one."""
    with_tls = [peer for peer in sorted(said) if said[peer].is_tls]
    without = [peer for peer in sorted(said) if not said[peer].is_tls]
    if with_tls and without:
        raise BadInput(
            f"rank {rank}: rank {with_tls[0]} has files of TLS and rank {without[0]} has not: give "
            "SHOAL_TLS_CERT, SHOAL_TLS_KEY and SHOAL_TLS_CA (`shoal keys tls`) to every host or to "
            "none"
        )
    for peer in with_tls:
        if said[peer].flaw:
            raise BadInput(
                f"rank {rank}: SHOAL_TLS_CA of rank {peer} does not vouch for its SHOAL_TLS_CERT "
                f"({said[peer].flaw}): make files for all hosts with `shoal keys tls`"
            )


STREAMS = 4  # of a pair: one for small messages and control, the others for large ones
_MOST_HANDSHAKES = 256
_CHECK_S = 0.1
_UNSENT_BYTES = 256 << 10  # more would wait in one stream while another one is free
Exchange = Callable[[bytes], list[bytes]]  # an all-gather of bytes


@dataclass(frozen=True)
class TcpSpec:
    """One rank of a TCP transport, and how its connections are made."""

    rank: int
    size: int
    key: bytes = field(repr=False)
    host: str = "127.0.0.1"  # where this rank listens, and what the others connect to
    peers: Collection[int] | None = None  # default: all other ranks
    streams: int = STREAMS
    tls: TlsConfig = field(default_factory=TlsConfig)
    timeout_s: float = 60.0
    check: Callable[[], None] = lambda: None  # raises where the others are not waited for any more

    @property
    def others(self) -> list[int]:
        chosen = range(self.size) if self.peers is None else sorted(self.peers)
        return [peer for peer in chosen if peer != self.rank]


class _Listener:
    """Accepts streams of higher ranks that prove the key, by peer and number."""

    def __init__(self, spec: TcpSpec):
        self._spec = spec
        self.changed = threading.Condition()
        self.streams: dict[tuple[int, int], socket.socket] = {}
        higher = [peer for peer in spec.others if peer > spec.rank]
        self._expected = {(peer, stream) for peer in higher for stream in range(spec.streams)}
        self._tls = tls.accepting(spec.tls)
        self._acceptor = Acceptor(_listen(spec.host))
        host, port = self._acceptor.sock.getsockname()[:2]
        flaw = tls.own_flaw(spec.tls, host)
        self.announcement = Announcement(host, port, spec.tls.is_mutual, flaw)
        self._greeter = Greeter("shoal-tcp", Strangers(_MOST_HANDSHAKES, GRACE_S))
        self._greeter.start(self._accept, self._greet)

    def await_streams(self, deadline_s: float) -> None:
        """PeerLost where a rank has not connected in time."""
        with self.changed:
            while late := sorted(self._expected - self.streams.keys()):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    doing = "connecting over TCP"
                    raise PeerLost(self._spec.rank, late[0][0], doing, self._spec.timeout_s)
                self.changed.wait(min(left_s, _CHECK_S))
                self._spec.check()

    def close(self) -> None:
        self._acceptor.close()
        self._greeter.close()

    def _accept(self, make_room: Callable[[], bool]) -> socket.socket | None:
        while (sock := self._acceptor.accept(make_room)) is not None:
            try:
                sock.settimeout(HANDSHAKE_S)
                return tls.accepted(sock, self._tls)
            except OSError:  # it has ended
                sock.close()
        return None

    def _greet(self, sock: socket.socket) -> bool:
        """Whether it is one of the streams that are expected, and stays open."""
        with suppress(OSError, Stranger):
            tls.shake_hands(sock)
            files = self._spec.tls
            shown = tls.own_certificate(files) if files.is_mutual else b""
            name = accept(sock, self._spec.key, shown)
            return self._greeter.strangers.remove(sock) and self._add(name, sock)
        return False

    def _add(self, name: StreamName, sock: socket.socket) -> bool:
        """False for a stream that is not expected. A second one stands for one that broke off."""
        key = (name.source, name.stream)
        if name.target != self._spec.rank or key not in self._expected:
            return False
        with self.changed:
            if key in self.streams:
                self.streams[key].close()
            self.streams[key] = sock
            self.changed.notify_all()
        return True


def connect_all(spec: TcpSpec, exchange: Exchange) -> dict[int, list[socket.socket]]:
    """The streams to every peer; all ranks call it. `exchange` tells the ranks' addresses."""
    require_open_files(spec.streams * len(spec.others))
    listener = _Listener(spec)
    made: dict[tuple[int, int], socket.socket] = {}
    try:
        said = [Announcement.parse(text) for text in exchange(listener.announcement.pack())]
        check_tls(spec.rank, {peer: said[peer] for peer in (spec.rank, *spec.others)})
        deadline_s = time.monotonic() + spec.timeout_s
        for peer in (peer for peer in spec.others if peer < spec.rank):
            for stream in range(spec.streams):
                name = StreamName(spec.rank, peer, stream)
                made[peer, stream] = _connect(spec, name, said[peer][:2], deadline_s)
        listener.await_streams(deadline_s)
    except BaseException:
        listener.close()
        for sock in (*listener.streams.values(), *made.values()):
            sock.close()
        raise
    listener.close()
    streams: dict[int, list[socket.socket]] = {}
    for (peer, _), sock in sorted({**made, **listener.streams}.items()):
        sock.settimeout(None)
        streams.setdefault(peer, []).append(sock)
    return streams


def _connect(
    spec: TcpSpec, name: StreamName, address: tuple[str, int], deadline_s: float
) -> socket.socket:
    """A connection that broke off is tried again until the deadline."""
    pause = Backoff(0.01, 0.5)
    where = f"rank {spec.rank} connects to rank {name.target} at {address[0]}:{address[1]}"
    while True:
        try:
            return _try_to_connect(spec, name, address)
        except (OSError, Stranger) as error:
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                raise BadInput(
                    f"{where}: {error.reason or error}: SHOAL_TLS_CA has to vouch for the "
                    "certificates of all hosts (`shoal keys tls`)"
                ) from error
            spec.check()
            pause()
            if time.monotonic() > deadline_s:
                raise ShoalError(f"{where}: {error}") from error


def _try_to_connect(spec: TcpSpec, name: StreamName, address: tuple[str, int]) -> socket.socket:
    sock = socket.create_connection(address, HANDSHAKE_S)
    try:
        _tune(sock)
        sock = tls.connected(sock, spec.tls, address[0])
        prove(sock, spec.key, name, tls.peer_certificate(sock))
        return sock
    except BaseException:
        sock.close()
        raise


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, 0), family=family, backlog=1024)
    except OSError as error:
        raise BadInput(
            f"this host cannot listen at {host}: {error.strerror} (SHOAL_HOST is the name or "
            "address of this host that others reach)"
        ) from error
    _tune(sock)  # accepted connections inherit it
    return sock


def _tune(sock: socket.socket) -> None:
    notice_silence(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
