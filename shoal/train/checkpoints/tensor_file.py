"""Files of tensors, as safetensors has them: written, and read again for their digests.

They are digested on the way, and go to the disk while the rest is being copied. A digest is that of
the digests of chunks, of which several are made at a time:

    xxh3(xxh3(first 8 MiB) + xxh3(next 8 MiB) + …)       16 bytes each

They tell damage. They cannot tell forgery, since a manifest has no key: who changes a file can
write its digest, too. So they need not be cryptographic, and XXH3 is faster than memory is copied.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor
from xxhash import xxh3_128

from shoal.errors import CheckpointError
from shoal.runtime.memory_limit import cores

CHUNK_BYTES = 8 << 20
DIGEST = "xxh3"
_BLOCK_BYTES = 1 << 20  # which stay in the cache of a core
_MOST_THREADS = 4


class NanError(Exception):
    """The name of a tensor that has values that are nan."""


def file_digest(descriptor: int) -> str:
    """Reads all of the file, on at most 4 cores, with 1 MiB of memory each.

    It is read, not mapped: an error of the disk is an OSError, and not a signal.
    """
    starts = range(0, os.fstat(descriptor).st_size, CHUNK_BYTES)
    threads = max(1, min(_MOST_THREADS, cores(), len(starts)))
    parts = [starts[thread::threads] for thread in range(threads)]
    with ThreadPoolExecutor(threads, "shoal-digest") as pool:
        others = pool.map(lambda part: _chunk_digests(descriptor, part), parts[1:])
        found = [_chunk_digests(descriptor, parts[0]), *others]
    in_order = (found[i % threads][i // threads] for i in range(len(starts)))
    return str(xxh3_128(b"".join(in_order)).hexdigest())


def _chunk_digests(descriptor: int, starts: range) -> list[bytes]:
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    found = []
    for start in starts:
        digest = xxh3_128()
        at = start
        end = start + CHUNK_BYTES
        while read := os.preadv(descriptor, [buffer[: end - at]], at):
            digest.update(buffer[:read])
            at += read
        found.append(digest.digest())
    return found


def write_tensors(
    tensors: Mapping[str, Tensor], file: Path, refuses_nan: bool = False
) -> dict[str, Any]:
    """A new file with tensors of the CPU; what a manifest says about it. It is not durable yet."""
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # all are aligned
    header = np.frombuffer(_header(tensors, order), dtype=np.uint8)
    pieces = chain([header], *(_pieces(name, tensors[name], refuses_nan) for name in order))
    done = 0
    digests = list[bytes]()
    digest = xxh3_128()
    with open(file, "xb") as handle:
        _allocate(handle.fileno(), len(header) + sum(t.nbytes for t in tensors.values()))
        for block in _blocks(pieces):
            digest.update(block)
            handle.write(block)
            begins_to_write = os.POSIX_FADV_DONTNEED  # on Linux
            os.posix_fadvise(handle.fileno(), done, len(block), begins_to_write)
            done += len(block)
            if done % CHUNK_BYTES == 0:
                digests.append(digest.digest())
                digest = xxh3_128()
    digests += [digest.digest()] if done % CHUNK_BYTES else []
    return {"name": file.name, "bytes": done, DIGEST: xxh3_128(b"".join(digests)).hexdigest()}


def _pieces(name: str, tensor: Tensor, refuses_nan: bool) -> Iterator[Any]:
    """The bytes of a tensor, as arrays."""
    for piece in torch.split(tensor.detach().reshape(-1), _BLOCK_BYTES // tensor.itemsize):
        if refuses_nan and _has_nan(piece):
            raise NanError(name)
        yield piece.view(torch.uint8).numpy()


def _has_nan(tensor: Tensor) -> bool:
    """A sum that is a number says that all are: it takes no memory, and reads once.

    numpy's, since torch would wake up threads for each piece.
    """
    if tensor.dtype in (torch.float32, torch.float64):
        with np.errstate(all="ignore"):
            if not np.isnan(tensor.numpy().sum()):
                return False
    return bool(tensor.isnan().any())


def _blocks(pieces: Iterable[Any]) -> Iterator[Any]:
    """The same bytes in blocks; only the last one may be shorter.

    They are copied, to the same memory: a digest is that of what is written, also where another
    thread writes to a tensor meanwhile.
    """
    block = np.empty(_BLOCK_BYTES, dtype=np.uint8)
    used = 0
    for left in pieces:
        while len(left):
            taken = left[: len(block) - used]
            block[used : used + len(taken)] = taken
            used = used + len(taken)
            left = left[len(taken) :]
            if used == len(block):
                yield block
                used = 0
    if used:
        yield block[:used]


def _allocate(descriptor: int, num_bytes: int) -> None:
    """Blocks of a file that is to be written, where the file system can: else fsync looks for them.

    Not `os.posix_fallocate`, which writes to every block where it cannot.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    has_failed = fallocate and fallocate(descriptor, 0, c_int64(0), c_int64(num_bytes))
    if has_failed and ctypes.get_errno() == errno.ENOSPC:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _header(tensors: Mapping[str, Tensor], order: list[str]) -> bytes:
    entries = {}
    end = 0
    for name in order:
        start = end
        end = end + tensors[name].nbytes
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
