"""Files of tensors, as safetensors has them: written, and read again for their digests.

They are digested on the way, and go to the disk while the rest is being copied. A digest is that of
the digests of chunks, of which several are made at a time:

    xxh3(xxh3(first 8 MiB) + xxh3(next 8 MiB) + …)       16 bytes each

They tell damage. They cannot tell forgery, since a manifest has no key: who changes a file can
write its digest, too. So they need not be cryptographic, and XXH3 is faster than memory is copied.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from hashlib import blake2b, sha256
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from xxhash import xxh3_128

from shoal.errors import CheckpointError
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


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> dict[str, Any]:
    """A new file with tensors of the CPU; what a manifest says about it. It is not durable yet."""
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # all are aligned
    contents = (_bytes_of(tensors[name]) for name in order)
    done, digests, digest = 0, list[bytes](), xxh3_128()
    with open(file, "xb", buffering=64 << 10) as handle:  # small tensors are written together
        for left in chain([memoryview(_header(tensors, order))], contents):
            while left:
                piece = left[: CHUNK_BYTES - done % CHUNK_BYTES]
                digest.update(piece)
                handle.write(piece)
                done, left = done + len(piece), left[len(piece) :]
                if done % CHUNK_BYTES == 0:
                    digests.append(digest.digest())
                    digest = xxh3_128()
                    os.posix_fadvise(  # Linux begins to write it
                        handle.fileno(), done - CHUNK_BYTES, CHUNK_BYTES, os.POSIX_FADV_DONTNEED
                    )
    digests += [digest.digest()] if done % CHUNK_BYTES else []
    return {"name": file.name, "bytes": done, DIGEST: xxh3_128(b"".join(digests)).hexdigest()}


def _header(tensors: Mapping[str, Tensor], order: list[str]) -> bytes:
    entries, end = {}, 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        entry = {"dtype": _dtype_name(tensors[name].dtype), "shape": [*tensors[name].shape]}
        entries[name] = {**entry, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    """The one that safetensors gives it."""
    try:
        entry = json.loads(save({"": torch.empty(1, dtype=dtype)})[8 : -dtype.itemsize])[""]
    except (KeyError, RuntimeError):
        entry = {"shape": None}
    if entry["shape"] != [1]:  # or it has several numbers in one byte
        raise CheckpointError(f"a checkpoint cannot hold tensors of {dtype}")
    return str(entry["dtype"])


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
