"""HTTP requests to the members of an etcd cluster: the next member where one does not answer.

Answers are JSON of declared types; numbers come as text, bytes as base64. A request that was not
answered may have been carried out: `Tried.is_repeated`.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from shoal.errors import BadInput
from shoal.runtime.decoders import decode_json
from shoal.runtime.trust import is_loopback
from shoal.server.coordinator import Unavailable, Versioned

_DEFAULT_PORT = 2379
_FORMS = "use etcd://HOST:PORT,HOST:PORT, or etcds://… for TLS"


class Endpoint(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_etcd(address: str) -> bool:
    return address.startswith(("etcd://", "etcds://"))


def parse_endpoints(address: str) -> list[Endpoint]:
    """`etcd://h1:2379,h2,[::1]:2379`; BadInput names what is wrong."""
    kind, _, text = address.partition("://")
    words = [word.strip() for word in text.rstrip("/").split(",")]
    if kind not in ("etcd", "etcds") or not all(words):
        raise BadInput(f"SHOAL_COORDINATOR is {address!r}: {_FORMS}")
    return [_endpoint(word, address) for word in words]


def _endpoint(word: str, address: str) -> Endpoint:
    try:
        url = urlsplit(f"//{word}")
        host = url.hostname or ""
        port = _DEFAULT_PORT if url.port is None else url.port
    except ValueError:
        host = ""
        port = 0
    is_host = bool(host) and url.netloc == word and "@" not in word
    if not is_host or not port or (":" in host and not word.startswith("[")):
        raise BadInput(f"SHOAL_COORDINATOR is {address!r}, and {word!r} is no HOST:PORT: {_FORMS}")
    return Endpoint(host, port)


def check_trusted(endpoints: list[Endpoint], trusted_network: bool) -> None:
    """What etcd says decides which servers count: it has to come from etcd."""
    for endpoint in endpoints:
        if not trusted_network and not is_loopback(endpoint.host):
            raise BadInput(
                f"what the servers agree on would cross the network to etcd at {endpoint} in the "
                "clear: use etcds:// (with SHOAL_ETCD_CA), or set SHOAL_TRUSTED_NETWORK=1 where "
                "the network is trusted"
            )


T = TypeVar("T")
NOT_FOUND = 5  # codes of gRPC
ALREADY_EXISTS = 9  # "lease already exists": a failed precondition, for etcd
UNCERTAIN = frozenset({1, 2, 4, 14})  # cancelled, unknown, deadline exceeded, unavailable


class EtcdError(Unavailable):
    """etcd has refused a request."""

    def __init__(self, code: int, reason: str):
        self.code = code
        super().__init__(f"etcd: {reason}")


class Revision(msgspec.Struct, frozen=True):
    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0

    def versioned(self) -> Versioned:
        return Versioned(self.value, self.mod_revision, self.lease or None)


class RangeAnswer(msgspec.Struct, frozen=True):
    kvs: tuple[KeyValue, ...] = ()


class TransactionPart(msgspec.Struct, frozen=True):
    response_range: RangeAnswer = RangeAnswer()


class TransactionAnswer(msgspec.Struct, frozen=True):
    header: Revision
    succeeded: bool = False
    responses: tuple[TransactionPart, ...] = ()

    def found(self, part: int) -> KeyValue | None:
        """What a range of the failure branch has found."""
        kvs = self.responses[part].response_range.kvs if part < len(self.responses) else ()
        return kvs[0] if kvs else None


class LeaseAnswer(msgspec.Struct, frozen=True):
    ID: int = 0
    TTL: int = 0


class KeepAliveAnswer(msgspec.Struct, frozen=True):
    result: LeaseAnswer


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: Any = ""
    message: str = ""
    code: int = 2


def parse(data: bytes, kind: type[T]) -> T:
    """ValueError for what is not such an answer."""
    try:
        return decode_json(data, kind)
    except ValueError as error:
        raise ValueError(f"{data[:80]!r} is no answer of etcd ({error})") from error


def error_of(status: int, data: bytes) -> EtcdError:
    try:
        answer = parse(data, ErrorAnswer)
    except ValueError:
        return EtcdError(2, f"HTTP status {status}: {data[:80]!r}")
    return EtcdError(answer.code, str(answer.message or answer.error)[:400])


FIRST_TRY_S = 0.5  # of each member; then twice as long, until the call has to end
_LONGEST_TRY_S = 4.0
_PAUSE_S = 0.03
_MAX_ANSWER_BYTES = 64 << 20
HEADERS = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}


class Tried(NamedTuple):
    """An answer, and whether the request may also have been carried out before."""

    answer: Any
    is_repeated: bool
    sent_s: float  # when the request that was answered was sent


class Gateway:
    """One request at a time, over one connection that is kept."""

    def __init__(self, endpoints: Sequence[Endpoint], context: ssl.SSLContext | None, who: str):
        self._endpoints = list(endpoints)
        self._context = context
        self._who = who
        self._at = 0
        self._connection: http.client.HTTPConnection | None = None
        self._sock: socket.socket | None = None  # of the connection
        self._lock = threading.Lock()
        self._is_closed = False

    def post(self, path: str, body: object, kind: type[T], deadline_s: float) -> T:
        answer: T = self.tried(path, body, kind, deadline_s).answer
        return answer

    def tried(self, path: str, body: object, kind: type[T], deadline_s: float) -> Tried:
        """Unavailable when no member has answered in time; EtcdError when one has refused it."""
        data = json.dumps(body).encode()
        if not self._lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise Unavailable(f"{self._who}: another request to {self} waits")
        try:
            return self._until_answered(path, data, kind, deadline_s)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends the request that waits, if one does."""
        self._is_closed = True
        sock = self._sock
        if sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        if self._lock.acquire(timeout=1.0):
            self._drop()
            self._lock.release()

    def __str__(self) -> str:
        return f"etcd at {', '.join(map(str, self._endpoints))}"

    def _until_answered(self, path: str, data: bytes, kind: type[T], deadline_s: float) -> Tried:
        tries = 0
        while True:
            try_s = FIRST_TRY_S * 2 ** (tries // len(self._endpoints))
            sent_s = time.monotonic()
            try:
                answer = self._try(path, data, min(try_s, _LONGEST_TRY_S, deadline_s - sent_s))
                return Tried(parse(answer, kind), tries > 0, sent_s)
            except EtcdError as error:
                if error.code not in UNCERTAIN:
                    raise
                reason = str(error)
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = str(error) or type(error).__name__
            tries += 1
            self._drop()
            self._at += 1
            if self._is_closed or time.monotonic() + _PAUSE_S >= deadline_s:
                raise Unavailable(f"{self._who}: {self} has not answered {path} ({reason})")
            time.sleep(_PAUSE_S)

    def _try(self, path: str, data: bytes, timeout_s: float) -> bytes:
        connection = self._connection or self._open(timeout_s)
        self._connection = connection
        connection.timeout = max(0.01, timeout_s)
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        connection.request("POST", path, data, HEADERS)
        self._sock = connection.sock
        response = connection.getresponse()
        answer = response.read(_MAX_ANSWER_BYTES)
        if response.status != 200:
            raise error_of(response.status, answer)
        return answer

    def _open(self, timeout_s: float) -> http.client.HTTPConnection:
        """To the member that answered last, or the next one; it connects when it is used."""
        if self._is_closed:
            raise ConnectionError("it is closed")
        host, port = self._endpoints[self._at % len(self._endpoints)]
        if self._context is None:
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._context)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = self._sock = None


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _all_under(folder: str) -> dict[str, str]:
    """The range of all keys that begin with this, which ends with a slash."""
    end = folder[:-1] + chr(ord("/") + 1)
    return {"key": text_of(folder.encode()), "range_end": text_of(end.encode())}


class RunKeys:
    """Keys in etcd, as text: the same for all processes of a run, and for no other run."""

    def __init__(self, secret: bytes):
        run = hashlib.sha256(b"shoal run in etcd" + secret).hexdigest()[:32]
        self._run = f"shoal/{run}/"
        self.everything = _all_under(self._run)

    def key(self, key: str) -> str:
        return text_of(f"{self._run}k/{key}".encode())

    def marker(self, client: str) -> str:
        """Holds the number of the latest change that a client has made."""
        return text_of(f"{self._run}r/{client}".encode())

    def name_of(self, key: bytes) -> str:
        return key.decode(errors="replace").removeprefix(f"{self._run}k/")

    def selection(self, name: str) -> dict[str, str]:
        """A key, or a range of keys where the name stands for all that begin with it."""
        if name and not name.endswith("/"):
            return {"key": self.key(name)}
        return _all_under(f"{self._run}k/{name}")
