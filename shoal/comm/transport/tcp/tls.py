"""Mutual TLS around a stream: both sides show a certificate that SHOAL_TLS_CA has signed.

The native code knows no TLS. So under TLS it gets one end of a pair of local sockets, and a thread
carries bytes between the other end and the TLS connection.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path

from shoal.errors import BadInput
from shoal.runtime.config import EtcdConfig, TlsConfig
from shoal.runtime.files import open_file

_PIECE_BYTES = 1 << 16
_MOST_FLIGHTS = 4  # of a handshake, in each direction


def accepting(tls: TlsConfig) -> ssl.SSLContext | None:
    """For `accepted`; BadInput where a file does not serve."""
    return own_context(tls, ssl.PROTOCOL_TLS_SERVER) if tls.is_mutual else None


def accepted(sock: socket.socket, context: ssl.SSLContext | None) -> socket.socket:
    """Before its handshake, so nothing is waited for."""
    if context is None:
        return sock
    return context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


def shake_hands(sock: socket.socket) -> None:
    if isinstance(sock, ssl.SSLSocket):
        sock.do_handshake()


def connected(sock: socket.socket, tls: TlsConfig, host: str) -> socket.socket:
    if not tls.is_mutual:
        return sock
    return own_context(tls, ssl.PROTOCOL_TLS_CLIENT).wrap_socket(sock, server_hostname=host)


def own_flaw(tls: TlsConfig, host: str) -> str:
    """Why the other ranks would refuse this one at `host`: a handshake with itself, in memory.

    Empty where they would not, if SHOAL_TLS_CA is the same for all.
    """
    if not tls.is_mutual:
        return ""
    there = ssl.MemoryBIO()
    back = ssl.MemoryBIO()
    client = own_context(tls, ssl.PROTOCOL_TLS_CLIENT).wrap_bio(back, there, server_hostname=host)
    server = own_context(tls, ssl.PROTOCOL_TLS_SERVER).wrap_bio(there, back, server_side=True)
    for _ in range(_MOST_FLIGHTS):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
            except ssl.SSLError as error:
                return error.reason or str(error)
    return ""


def own_certificate(tls: TlsConfig) -> bytes:
    """What the other side sees: the first certificate of the file."""
    assert tls.certificate is not None
    text = Path(tls.certificate).read_text(encoding="utf-8", errors="replace")
    begin = text.index(ssl.PEM_HEADER)
    end = text.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)
    return ssl.PEM_cert_to_DER_cert(text[begin:end])


def peer_certificate(sock: socket.socket) -> bytes:
    if not isinstance(sock, ssl.SSLSocket):
        return b""
    return sock.getpeercert(binary_form=True) or b""


def own_context(
    tls: TlsConfig | EtcdConfig, protocol: int, variables: str = "SHOAL_TLS"
) -> ssl.SSLContext:
    """With the certificate of this host, if it has one: the other side may ask for it.

    With an authority the other side has to show one, too; clients have that of the system else.
    """
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.certificate:
        try:
            for file in (tls.certificate, tls.key or tls.certificate):
                os.close(open_file(Path(file)))  # OSError for a FIFO, which would never end
            context.load_cert_chain(tls.certificate, tls.key)
        except OSError as error:  # ssl.SSLError is one
            raise BadInput(f"{variables}_CERT {tls.certificate}: {error}") from error
    if tls.authority:
        try:
            context.load_verify_locations(tls.authority)
        except OSError as error:
            raise BadInput(f"{variables}_CA {tls.authority}: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    elif protocol == ssl.PROTOCOL_TLS_CLIENT:
        context.load_default_certs()
    return context


class TlsPump:
    """Carries bytes both ways; `inner` is the end for the native code."""

    def __init__(self, outer: ssl.SSLSocket):
        self.inner, self._near = socket.socketpair()
        self._outer = outer
        for sock in (outer, self._near):
            sock.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="shoal tls", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with suppress(OSError):
            self._carry()
        for sock in (self._outer, self._near):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _carry(self) -> None:
        going_out = bytearray()
        coming_in = bytearray()
        while True:
            self._wait(going_out, coming_in)
            if not _fill(self._near, going_out):
                self._outer.settimeout(1.0)
                return self._outer.sendall(going_out)
            if not _fill(self._outer, coming_in):
                return None
            _drain(self._outer, going_out)
            _drain(self._near, coming_in)

    def _wait(self, going_out: bytearray, coming_in: bytearray) -> None:
        if self._outer.pending() and not coming_in:
            return
        poll = select.poll()
        poll.register(self._near, _events(not going_out, bool(coming_in)))
        poll.register(self._outer, _events(not coming_in, bool(going_out)))
        poll.poll()


def _events(reads: bool, writes: bool) -> int:
    return (select.POLLIN if reads else 0) | (select.POLLOUT if writes else 0)


def _fill(sock: socket.socket, buffer: bytearray) -> bool:
    """Read into an empty buffer what is there now; False at the end of the stream."""
    if buffer:
        return True
    try:
        data = sock.recv(_PIECE_BYTES)
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return True
    buffer += data
    return bool(data)


def _drain(sock: socket.socket, buffer: bytearray) -> None:
    if not buffer:
        return
    try:
        sent = sock.send(buffer)
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return
    del buffer[:sent]
