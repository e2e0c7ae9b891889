"""A connection that carries frames.

Payloads go straight from and to the memory of tensors (sendmsg, recv_into).
"""

from __future__ import annotations

import array
import os
import socket
import ssl
import threading
from contextlib import suppress

from shoal.server.protocol.frames import HEADER_BYTES, Header, Refused, pack, unpack, verify

_CHUNK_BYTES = 1 << 20


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

    def abort(self) -> None:
        """End the connection from another thread than the one that reads.

        The reader closes the descriptor. If it were closed here, the reader could read from
        another file that has got the same number.
        """
        with suppress(OSError):  # SSLSocket.shutdown would turn it into a plain socket
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
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
