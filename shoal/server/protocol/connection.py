"""A connection that carries frames.

Payloads go straight from and to the memory of tensors (sendmsg, recv_into).
"""

from __future__ import annotations

import array
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress

from shoal.runtime import clock
from shoal.runtime.acceptor import end_socket
from shoal.server.protocol import HEADER_BYTES, Header, Refused, pack, unpack, verify

_CHUNK_BYTES = 1 << 20
_AHEAD_BYTES = 4096
_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)  # for one descriptor


def pack_frame(header: Header, meta: bytes, payload: Sequence[memoryview]) -> bytes:
    """Header and metadata of a frame with this payload."""
    return pack(header, meta, sum([view.nbytes for view in payload]))


_MAX_BUFFERS = 1024  # IOV_MAX: of one sendmsg


class Closed(ConnectionError):
    """The connection has ended."""


class TimedOut(Closed):
    """The other side has not taken or sent anything for as long as the socket waits."""


class Connection:
    """Frames in both directions. One thread reads; writing is guarded.

    A frame that was sent or read in part ends the connection: the next bytes would be taken for
    the rest of it.
    """

    def __init__(self, sock: socket.socket, certificate: bytes = b""):
        """`certificate` is the server's, under TLS: both sides prove which one they see."""
        self.sock = sock
        self.certificate = certificate
        self.is_unix = sock.family == socket.AF_UNIX
        self.sent_bytes = self.received_bytes = self.requests = 0
        self._head = bytearray(HEADER_BYTES)
        self._sending = clock.Lock()
        self.is_plain = not isinstance(sock, ssl.SSLSocket)  # frames are the bytes of the socket
        self._descriptors: list[int] = []
        self._buffer = memoryview(b"")  # for frames that are read in one piece
        self._left = self._buffer  # of it: what was received and not asked for yet
        self._broken: str | None = None  # why no frame can follow the latest one
        self._deadline_s: float | None = None

    def send(
        self, header: Header, meta: bytes = b"", *payload: memoryview, descriptor: int | None = None
    ) -> None:
        """A frame, with the descriptor of an open file (Unix sockets) or without."""
        payload_bytes = sum([view.nbytes for view in payload])
        head = pack(header, meta, payload_bytes)
        views = [memoryview(head), *[view.cast("B") for view in payload if view.nbytes]]
        size = len(head) + payload_bytes

        def send() -> int:
            if not self.is_plain:
                for view in views:
                    self.sock.sendall(view)
                return size
            rights = () if descriptor is None else _rights(descriptor)
            sent = self.sock.sendmsg(views[:_MAX_BUFFERS], rights)
            if sent < size:
                self._send_after(sent, views)
            return size

        self._send_whole(send)

    def send_now(self, header: Header, meta: bytes, *payload: memoryview) -> memoryview | None:
        """Send a small frame without waiting; returns what the other side has no room for yet.

        The rest is to be sent (`send_rest`) before any other frame. None: this connection cannot.
        """
        if not self.is_plain:
            return None
        frame = b"".join((pack_frame(header, meta, payload), *payload))

        def send() -> int:
            try:
                return self.sock.send(frame, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return 0

        return memoryview(frame)[self._send_whole(send) :]

    def send_rest(self, rest: memoryview) -> None:
        def send() -> int:
            self.sock.sendall(rest)
            return rest.nbytes

        self._send_whole(send)

    def _send_whole(self, send: Callable[[], int]) -> int:
        """A frame is sent whole, or is the last one of its connection. One at a time."""
        with self._sending:
            self.check_whole()
            try:
                sent = send()
            except BaseException as error:
                found = self.break_off(error)
                if found is error:
                    raise
                raise found from error
        self.sent_bytes += sent
        return sent

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

    def receive_within(self, max_meta: int, limit_s: float) -> tuple[Header, bytes]:
        """As `receive`; TimedOut after so long, even where single bytes come now and then."""
        before_s = self.sock.gettimeout()
        self._deadline_s = clock.monotonic() + limit_s
        try:
            return self.receive(max_meta)
        finally:
            self._deadline_s = None
            self.sock.settimeout(before_s)

    def _read(self, count: int) -> bytes:
        """In chunks: an announced length alone allocates nothing."""
        if self._left.nbytes >= count:
            self.received_bytes += count
            taken = bytes(self._left[:count])
            self._left = self._left[count:]
            return taken
        if count <= _CHUNK_BYTES:
            whole = bytearray(count)
            self.read_into(memoryview(whole))
            return bytes(whole)
        data = bytearray()
        while len(data) < count:
            chunk = bytearray(min(_CHUNK_BYTES, count - len(data)))
            self.read_into(memoryview(chunk))
            data += chunk
        return bytes(data)

    def read_ahead(self, num_bytes: int = _AHEAD_BYTES) -> None:
        """From now on read frames of less than `num_bytes` in one piece."""
        self._buffer = memoryview(bytearray(num_bytes))

    def read_into(self, view: memoryview) -> None:
        view = view.cast("B") if view.nbytes else view
        size = view.nbytes
        done = self._take(view) if self._left else 0
        while done < size:
            try:
                if self._deadline_s is not None:
                    left_s = self._deadline_s - clock.monotonic()
                    if left_s <= 0:
                        raise TimeoutError("timed out")
                    self.sock.settimeout(left_s)
                if size - done < self._buffer.nbytes:
                    self._left = self._buffer[: self._receive(self._buffer)]
                    count = self._take(view[done:])
                else:
                    count = self._receive(view[done:] if done else view)
            except OSError as error:
                raise self.break_off(error) from error
            except BaseException as error:  # Ctrl-C
                self.break_off(error)
                raise
            if not count:
                raise Closed(self._broken or "the other side has closed the connection")
            done += count
        self.received_bytes += size

    def _take(self, view: memoryview) -> int:
        """How many bytes of `view` are filled with what was read ahead."""
        count = min(view.nbytes, self._left.nbytes)
        view[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

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

    def break_off(self, error: BaseException) -> BaseException:
        """End it in the middle of a frame; returns what is to be raised.

        Frames that had arrived, such as the reason of the other side, can still be read.
        """
        self._broken = self._broken or str(error) or type(error).__name__
        self.abort()
        if isinstance(error, TimeoutError):
            return TimedOut(self._broken)
        return Closed(self._broken) if isinstance(error, OSError) else error

    @property
    def is_whole(self) -> bool:
        return self._broken is None

    def check_whole(self) -> None:
        """Closed if a frame was sent or read in part."""
        if self._broken is not None:
            raise Closed(self._broken)

    def abort(self) -> None:
        """End the connection from another thread than the one that reads.

        The reader closes the descriptor. If it were closed here, the reader could read from
        another file that has got the same number.
        """
        end_socket(self.sock)

    def close(self) -> None:
        self.abort()
        self.sock.close()
        self._drop_descriptors()

    def _receive(self, view: memoryview) -> int:
        if not self.is_unix:
            return self.sock.recv_into(view)
        count, ancillary, _, _ = self.sock.recvmsg_into([view], _SPACE, socket.MSG_CMSG_CLOEXEC)
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

    def _send_after(self, sent: int, views: list[memoryview]) -> None:
        """The rest of a frame whose first `sent` bytes have been sent."""
        while True:
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if not views:
                return
            views[0] = views[0][sent:]
            sent = self.sock.sendmsg(views[:_MAX_BUFFERS])


def _rights(descriptor: int) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
