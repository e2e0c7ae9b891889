"""Digests of large files: of chunks, several at a time, and one of these digests.

    xxh3(xxh3(first 8 MiB) + xxh3(next 8 MiB) + …)       16 bytes each

They tell damage. They cannot tell forgery, since a manifest has no key: who changes a file can
write its digest, too. So they need not be cryptographic, and XXH3 is faster than memory is copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b, sha256
from typing import Any

from xxhash import xxh3_128

from shoal.runtime.memory_limit import cores

CHUNK_BYTES = 8 << 20
DIGEST = "xxh3"
KINDS: dict[str, Callable[..., Any]] = {
    DIGEST: xxh3_128,
    "blake2b": partial(blake2b, digest_size=32),  # of checkpoints in format 3
    "sha256": sha256,  # in format 2, from end to end
}
_READ_BYTES = 1 << 20  # which stay in the cache of a core
_MOST_THREADS = 4


def file_digest(descriptor: int, kind: str = DIGEST) -> str:
    """Reads all of the file, on at most 4 cores, with 1 MiB of memory each.

    It is read, not mapped: an error of the disk is an OSError, and not a signal.
    """
    size = os.fstat(descriptor).st_size
    if kind == "sha256":
        return _chunk_digests(descriptor, range(1), kind, size)[0].hex()
    starts = range(0, size, CHUNK_BYTES)
    threads = max(1, min(_MOST_THREADS, cores(), len(starts)))
    parts = [starts[thread::threads] for thread in range(threads)]
    with ThreadPoolExecutor(threads, "shoal-digest") as pool:
        others = pool.map(lambda part: _chunk_digests(descriptor, part, kind), parts[1:])
        found = [_chunk_digests(descriptor, parts[0], kind), *others]
    in_order = (found[i % threads][i // threads] for i in range(len(starts)))
    return str(KINDS[kind](b"".join(in_order)).hexdigest())


def _chunk_digests(
    descriptor: int, starts: range, kind: str, chunk_bytes: int = CHUNK_BYTES
) -> list[bytes]:
    buffer = memoryview(bytearray(_READ_BYTES))
    found = []
    for start in starts:
        digest, at, end = KINDS[kind](), start, start + chunk_bytes
        while read := os.preadv(descriptor, [buffer[: end - at]], at):
            digest.update(buffer[:read])
            at += read
        found.append(digest.digest())
    return found
