"""Another user of the host (uid 65534), who tries all that a run listens at, shares or writes.

Reads targets from stdin, a JSON list a line: ["tcp", host, port], ["store",
host, port], ["unix", path], ["file", path].
Prints what let it in; a line "." follows each target.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # the other user cannot load it
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shoal.comm.store.session import connect
from shoal.errors import ShoalError
from shoal.server.protocol import FrameKind, Header, pack

OTHER_UID = 65534
LIMIT_S = 1.0
HOSTILE = {
    "nothing": b"",
    "noise": secrets.token_bytes(4096),
    "web": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "zeros": bytes(1 << 16),
    "length": b"\xff" * 64 + b"\xa3set\x91\xa2\xff\xfe",
    "frame": pack(Header(FrameKind.HELLO), b"\x81\xa5nonce\xc4\xff"),
    "gloo": (1).to_bytes(8, "little") * 8,
}


def enter_tcp(host: str, port: int) -> Iterator[str]:
    for data in HOSTILE.values():
        with suppress(OSError), socket.create_connection((host, port), LIMIT_S) as sock:
            sock.settimeout(0.1)
            sock.sendall(data)
            sock.recv(4096)
    for secret in (b"", b"0" * 32):
        with suppress(ShoalError, OSError):
            connect((host, port), secret, 0).close()
            yield f"the rendezvous at {host}:{port}"


def enter_store(host: str, port: int) -> Iterator[str]:
    """Of torchrun's agent, which asks for no key."""
    yield from enter_tcp(host, port)
    with suppress(RuntimeError):
        store = TCPStore(host, port, timeout=timedelta(seconds=LIMIT_S), wait_for_workers=False)
        for key in store.list_keys():
            if not key.startswith("torch"):  # of torchrun itself
                yield f"{key} in the store of torchrun"


def enter_unix(path: str) -> Iterator[str]:
    with suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LIMIT_S)
        sock.connect("\0" + path[1:] if path.startswith("@") else path)
        yield f"the socket {path}"


def enter_file(path: str) -> Iterator[str]:
    for mode in ("rb", "r+b"):
        with suppress(OSError), open(path, mode):
            yield f"{path} ({mode})"
    with suppress(OSError):
        os.listdir(path)
        yield f"the folder {path}"


ENTER: dict[str, Callable[..., Iterator[str]]] = {
    "tcp": enter_tcp,
    "store": enter_store,
    "unix": enter_unix,
    "file": enter_file,
}


def main() -> None:
    os.setgroups([])
    os.setgid(OTHER_UID)
    os.setuid(OTHER_UID)
    with suppress(OSError):
        squatted = Path(os.environ["TMPDIR"], "shoal-0")
        squatted.mkdir(mode=0o777)
        (squatted / "key").write_text("00" * 32)
    print(".", flush=True)
    for line in sys.stdin:
        kind, *where = json.loads(line)
        for entered in ENTER[kind](*where):
            print(entered, flush=True)
        print(".", flush=True)


if __name__ == "__main__":
    main()
