"""A connection that carries frames, and the addresses of servers.

    unix:/path/of/socket      one host (default)
    tcp:host:port             several hosts

Payloads go straight from and to the memory of tensors (sendmsg, recv_into). Beyond loopback a
listener asks for TLS (SHOAL_TLS_CERT and SHOAL_TLS_KEY, and SHOAL_TLS_CA for those who connect)
or for the explicit word that the network is trusted (SHOAL_TRUSTED_NETWORK=1).
"""

from __future__ import annotations

import array
import ipaddress
import os
import socket
import ssl
import threading
from contextlib import suppress

from shoal.errors import BadInput
from shoal.runtime.config import RunConfig, TlsConfig
from shoal.server.protocol.frames import HEADER_BYTES, Header, Refused, pack, unpack, verify

CONNECT_S = 30.0
_CHUNK_BYTES = 1 << 20
SILENT_PEER_MS = 30_000  # a host that does not respond is lost after so long


class Closed(ConnectionError):
    """The connection has ended."""


class Connection:
    """Frames in both directions. One thread reads; writing is guarded."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.is_unix = sock.family == socket.AF_UNIX
        self.sent_bytes = self.received_bytes = self.requests = 0
        self._head = bytearray(HEADER_BYTES)
        self._writing = threading.Lock()
        self._scatters = not isinstance(sock, ssl.SSLSocket)
        self._descriptors: list[int] = []

    def send(self, header: Header, meta: bytes = b"", *payload: memoryview) -> None:
        size = sum(view.nbytes for view in payload)
        head = pack(header._replace(payload_bytes=size), meta)
        with self._writing:
            try:
                self._send_all([memoryview(head), *payload])
            except OSError as error:
                raise Closed(str(error)) from error
        self.sent_bytes += len(head) + size

    def send_descriptor(self, header: Header, meta: bytes, descriptor: int) -> None:
        """A frame without payload, with the descriptor of an open file (Unix sockets)."""
        head = pack(header, meta)
        with self._writing:
            try:
                sent = socket.send_fds(self.sock, [head], [descriptor])
                if sent < len(head):
                    self.sock.sendall(head[sent:])
            except OSError as error:
                raise Closed(str(error)) from error

    def receive(self, max_meta: int) -> tuple[Header, bytes]:
        """The next header and its metadata; the caller reads the payload."""
        self.read_into(memoryview(self._head))
        header = unpack(self._head)
        if header.meta_bytes > max_meta:
            raise Refused(f"{header.meta_bytes} bytes of metadata: at most {max_meta} are allowed")
        meta = self._read(header.meta_bytes)
        verify(self._head, meta, header)
        self.requests += 1
        return header, meta

    def _read(self, count: int) -> bytes:
        """In chunks: an announced length alone allocates nothing."""
        data = bytearray()
        while len(data) < count:
            chunk = bytearray(min(_CHUNK_BYTES, count - len(data)))
            self.read_into(memoryview(chunk))
            data += chunk
        return bytes(data)

    def read_into(self, view: memoryview) -> None:
        view = view.cast("B") if view.nbytes else view
        done = 0
        size = view.nbytes
        while done < size:
            try:
                count = self._receive(view[done:])
            except OSError as error:
                raise Closed(str(error)) from error
            if not count:
                raise Closed("the other side has closed the connection")
            done += count
        self.received_bytes += size

    def skip(self, count: int) -> None:
        """Read and discard a payload."""
        scratch = memoryview(bytearray(min(count, _CHUNK_BYTES)))
        while count:
            chunk = scratch[: min(count, scratch.nbytes)]
            self.read_into(chunk)
            count -= chunk.nbytes

    def take_descriptor(self) -> int | None:
        """The descriptor that came with the latest frame, if one did; the caller closes it."""
        descriptor = self._descriptors.pop() if self._descriptors else None
        self._drop_descriptors()
        return descriptor

    def cut(self) -> None:
        """End the connection from another thread than the one that reads.

        The reader closes the descriptor. If it were closed here, the reader could read from
        another file that has got the same number.
        """
        with suppress(OSError):  # SSLSocket.shutdown would turn it into a plain socket
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self.sock.close()
        self._drop_descriptors()

    def _receive(self, view: memoryview) -> int:
        if not self.is_unix:
            return self.sock.recv_into(view)
        space = socket.CMSG_SPACE(array.array("i").itemsize)
        count, ancillary, _, _ = self.sock.recvmsg_into([view], space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                self._drop_descriptors()  # keep one frame's at most: the table cannot fill up
                self._descriptors += descriptors
        return count

    def _drop_descriptors(self) -> None:
        # another thread may close the connection: pop, so that each is closed once
        while self._descriptors:
            with suppress(IndexError):
                os.close(self._descriptors.pop())

    def _send_all(self, buffers: list[memoryview]) -> None:
        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        if not self._scatters:
            for view in views:
                self.sock.sendall(view)
            return
        while views:
            sent = self.sock.sendmsg(views)
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if views and sent:
                views[0] = views[0][sent:]


def connect(address: str, tls: TlsConfig | None = None, timeout_s: float = CONNECT_S) -> Connection:
    """To a server; waits for one that is still starting is the caller's business."""
    tls = tls or RunConfig.from_environment().tls
    kind, _, place = address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(place)
        except OSError:
            sock.close()
            raise
    else:
        host, port = _host_and_port(address)
        authority = tls.authority
        if not authority and not is_loopback(host):
            _check_trusted(host, tls)
        sock = socket.create_connection((host, port), timeout_s)
        tune(sock)
        if authority:
            sock = _secured(sock, host, address, authority)
    sock.settimeout(None)
    return Connection(sock)


def _secured(sock: socket.socket, host: str, address: str, authority: str) -> ssl.SSLSocket:
    """The connection under TLS, to a server that SHOAL_TLS_CA vouches for."""
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError as error:
        sock.close()
        raise BadInput(f"SHOAL_TLS_CA {authority}: {error}") from error
    try:
        return context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        why = f"shows a certificate that SHOAL_TLS_CA does not vouch for ({error.verify_message})"
        raise BadInput(f"the server at {address} {why}") from error
    except ssl.SSLEOFError as error:
        raise Closed(str(error)) from error
    except ssl.SSLError as error:
        raise BadInput(
            f"the server at {address} does not speak TLS, as SHOAL_TLS_CA asks it to ({error})"
        ) from error
    finally:
        sock.close()  # what is left of it: nothing, where TLS has taken it over


class Listener:
    """Where connections arrive. `accept` returns None once it is closed."""

    def __init__(self, address: str, tls: TlsConfig | None = None):
        tls = tls or RunConfig.from_environment().tls
        kind, _, place = address.partition(":")
        self._path: str | None = None
        self._tls: ssl.SSLContext | None = None
        if kind == "unix":
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._bind(place)
            os.chmod(place, 0o600)
            self._path = place
            self.address = address
        elif kind == "tcp":
            host, port = _host_and_port(address)
            self._tls = _server_context(tls)
            if self._tls is None and not is_loopback(host):
                _check_trusted(host, tls)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._sock = socket.socket(family, socket.SOCK_STREAM)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._bind((host, port))
            self.address = f"tcp:{host}:{self._sock.getsockname()[1]}"
        else:
            raise BadInput(f"a server listens at unix:PATH or tcp:HOST:PORT, not at {address!r}")
        self._sock.listen(256)

    def accept(self) -> socket.socket | None:
        """The next connection, bare: whoever serves it calls `secure`, which may take a while."""
        try:
            sock, _ = self._sock.accept()
        except OSError:
            return None
        if self._path is None:
            tune(sock)
        return sock

    def secure(self, sock: socket.socket) -> socket.socket:
        return sock if self._tls is None else self._tls.wrap_socket(sock, server_side=True)

    def close(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        if self._path is not None:
            with suppress(OSError):
                os.unlink(self._path)

    def _bind(self, place: str | tuple[str, int]) -> None:
        try:
            self._sock.bind(place)
        except OSError as error:
            self._sock.close()
            raise BadInput(f"a server cannot listen at {place}: {error}") from error


def tune(sock: socket.socket) -> None:
    """Send small frames without delay; notice a host that does not respond."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_USER_TIMEOUT", SILENT_PEER_MS),
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 4),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_and_port(address: str) -> tuple[str, int]:
    kind, _, place = address.partition(":")
    host, _, port = place.rpartition(":")
    if kind != "tcp" or not host or not port.isdigit() or int(port) > 65535:
        raise BadInput(f"a server's address is unix:PATH or tcp:HOST:PORT, not {address!r}")
    return host.strip("[]"), int(port)


def _server_context(tls: TlsConfig) -> ssl.SSLContext | None:
    certificate = tls.certificate
    if not certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise BadInput(f"SHOAL_TLS_CERT {certificate}: {error}") from error
    return context


def _check_trusted(host: str, tls: TlsConfig) -> None:
    if not tls.trusted_network:
        raise BadInput(
            f"weights and gradients would cross the network to or from {host} in the clear: give "
            "SHOAL_TLS_CERT, SHOAL_TLS_KEY and SHOAL_TLS_CA, or set SHOAL_TRUSTED_NETWORK=1 where "
            "the network is trusted"
        )
