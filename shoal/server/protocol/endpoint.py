"""Addresses of servers: listening at them, and connecting to them.

    unix:/path/of/socket      one host (default)
    tcp:host:port             several hosts

Beyond loopback a listener requires TLS (SHOAL_TLS_CERT and SHOAL_TLS_KEY; with SHOAL_TLS_CA both
sides show certificates), or the statement that the network is trusted (SHOAL_TRUSTED_NETWORK=1).
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from shoal.comm.transport.tcp.tls import own_certificate, own_context
from shoal.errors import BadInput
from shoal.runtime.acceptor import Acceptor, no_room, notice_silence
from shoal.runtime.config import TlsConfig
from shoal.runtime.trust import is_loopback
from shoal.server.protocol.connection import Closed, Connection

CONNECT_S = 30.0
PLAIN = TlsConfig()  # for sockets of this host
_sockets: Any = None  # of a rehearsal, in place of the machine's


@contextmanager
def replaced_sockets(by: Any) -> Iterator[None]:
    """While the block runs, `by` listens and connects: see `rehearse/sockets.py`."""
    global _sockets
    before = _sockets
    _sockets = by
    try:
        yield
    finally:
        _sockets = before


def connect(address: str, tls: TlsConfig = PLAIN, timeout_s: float = CONNECT_S) -> Connection:
    """Connect to a server that listens; an OSError if it does not."""
    kind, _, path = address.partition(":")
    if _sockets is not None:
        return Connection(_sockets.connect(address, timeout_s))
    if kind == "unix":
        sock = _connect_unix(path, timeout_s)
    else:
        sock = _connect_tcp(address, tls, timeout_s)
    sock.settimeout(None)
    shown = sock.getpeercert(binary_form=True) if isinstance(sock, ssl.SSLSocket) else None
    return Connection(sock, shown or b"")


def _connect_unix(path: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def _connect_tcp(address: str, tls: TlsConfig, timeout_s: float) -> socket.socket:
    host, port = _host_and_port(address)
    if not tls.authority:
        require_encrypted(host, tls)
    sock = socket.create_connection((host, port), timeout_s)
    notice_silence(sock)
    return _secured(sock, host, address, tls) if tls.authority else sock


def _secured(sock: socket.socket, host: str, address: str, tls: TlsConfig) -> ssl.SSLSocket:
    """The connection under TLS, to a server whose certificate SHOAL_TLS_CA has signed."""
    try:
        context = own_context(tls, ssl.PROTOCOL_TLS_CLIENT)
    except BadInput:
        sock.close()
        raise
    try:
        return context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        reason = f"that SHOAL_TLS_CA does not vouch for ({error.verify_message})"
        raise BadInput(f"the server at {address} shows a certificate {reason}") from error
    except ssl.SSLEOFError as error:
        raise Closed(str(error)) from error
    except ssl.SSLError as error:
        raise BadInput(
            f"the server at {address} does not speak TLS, as SHOAL_TLS_CA asks it to ({error})"
        ) from error
    finally:
        sock.close()  # has no effect if TLS has taken the descriptor over


def remove_left_socket(address: str) -> None:
    """Remove the socket of a process that was killed; has no effect if one listens there."""
    kind, _, path = address.partition(":")
    if kind != "unix" or not os.path.exists(path):
        return
    try:
        _connect_unix(path, CONNECT_S).close()
    except ConnectionRefusedError:
        os.unlink(path)


class Listener:
    """Accepts connections at one address. `accept` returns None once it is closed."""

    def __init__(self, address: str, tls: TlsConfig = PLAIN):
        kind, _, path = address.partition(":")
        self._path: str | None = None
        self._context: ssl.SSLContext | None = None
        self._certificate = b""
        if _sockets is not None:
            self.address, self._acceptor = _sockets.listen(address)
            return
        if kind == "unix":
            sock = _bound(socket.AF_UNIX, path)
            os.chmod(path, 0o600)
            self._path = path
            self.address = address
        elif kind == "tcp":
            host, port = _host_and_port(address)
            self._context = _server_context(host, tls)
            self._certificate = own_certificate(tls) if self._context else b""
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sock = _bound(family, (host, port))
            self.address = f"tcp:{host}:{sock.getsockname()[1]}"
        else:
            raise BadInput(f"a server listens at unix:PATH or tcp:HOST:PORT, not at {address!r}")
        sock.listen(256)
        self._acceptor = Acceptor(sock)

    def accept(self, make_room: Callable[[], bool] = no_room) -> socket.socket | None:
        """The next connection; under TLS before its handshake, which may take long.

        `make_room`: see `Acceptor`.
        """
        while (sock := self._acceptor.accept(make_room)) is not None:
            try:
                return self._prepared(sock)
            except OSError:  # it has ended
                sock.close()
        return None

    def close(self) -> None:
        self._acceptor.close()
        if self._path is not None:
            with suppress(OSError):
                os.unlink(self._path)

    def _prepared(self, sock: socket.socket) -> socket.socket:
        if self._path is None:
            notice_silence(sock)
        if self._context is None:
            return sock
        return self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def secure(self, sock: socket.socket) -> Connection:
        """Under TLS, the handshake; for the thread of one connection."""
        if isinstance(sock, ssl.SSLSocket):
            sock.do_handshake()
        return Connection(sock, self._certificate)


def _bound(family: int, address: str | tuple[str, int]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    if family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise BadInput(f"a server cannot listen at {address}: {error}") from error
    return sock


def _host_and_port(address: str) -> tuple[str, int]:
    kind, _, location = address.partition(":")
    host, _, port = location.rpartition(":")
    if kind != "tcp" or not host or not port.isdigit() or int(port) > 65535:
        raise BadInput(f"a server's address is unix:PATH or tcp:HOST:PORT, not {address!r}")
    return host.strip("[]"), int(port)


def _server_context(host: str, tls: TlsConfig) -> ssl.SSLContext | None:
    """TLS with the server's certificate; None without one, where the network is trusted.

    With SHOAL_TLS_CA those who connect have to show a certificate of that authority, too.
    """
    if not tls.certificate:
        require_encrypted(host, tls)
        return None
    return own_context(tls, ssl.PROTOCOL_TLS_SERVER)


def require_encrypted(host: str, tls: TlsConfig) -> None:
    """BadInput where bytes would cross a network that is not trusted, and there is no TLS."""
    if not tls.trusted_network and not is_loopback(host):
        raise BadInput(
            f"weights and gradients would cross the network to or from {host} in the clear: give "
            "SHOAL_TLS_CERT, SHOAL_TLS_KEY and SHOAL_TLS_CA, or set SHOAL_TRUSTED_NETWORK=1 where "
            "the network is trusted"
        )
