"""Tensors in the host's memory, and copies of them that run beside what a GPU computes.

On a CPU the same code makes plain tensors and copies.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from shoal.comm.transport.transport import DoneWork, Work


def host_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers in memory that a GPU copies from and to while its host goes on.

    Its pages are registered, because torch rounds pinned memory up to a power of two.
    """
    if device.type != "cuda" or not numel:
        return torch.zeros(numel, dtype=dtype)
    num_bytes = numel * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages are faster to register
    memory = (ctypes.c_byte * num_bytes).from_buffer(pages)
    address = ctypes.addressof(memory)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, num_bytes, 0)))
    # `pages` are an argument, so that they are mapped until then
    released = weakref.finalize(memory, _unregister, address, pages)
    released.atexit = False
    return torch.frombuffer(memory, dtype=dtype)


def _unregister(address: int, pages: mmap.mmap) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(address)


class HostCopies:
    """A stream of a GPU for copies from or to the host."""

    memory_column = "in_flight"

    def __init__(self, device: torch.device):
        self._kept: deque[tuple[Work, Sequence[Tensor]]] = deque()
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is called inside runs beside what is computed later, and after what was before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def begun(self) -> Work:
        """All that was called so far; its `wait` has what is computed later wait for it."""
        return DoneWork() if self._stream is None else _Copied(self._stream.record_event())

    def keep(self, tensors: Sequence[Tensor], most: int = 1) -> None:
        """Free them when what was called so far is done, and all but the latest `most` now.

        What is freed may be overwritten by what is computed next.
        """
        self._kept.append((self.begun(), tensors))
        self._release(most)

    @property
    def kept(self) -> list[Tensor]:
        return [tensor for _, tensors in self._kept for tensor in tensors]

    def end(self, on_host: bool = False) -> None:
        """What is computed next follows all that was called; with `on_host`, what the host does."""
        self._release(0)
        if on_host and self._stream is not None:
            self._stream.synchronize()

    def _release(self, most: int) -> None:
        while len(self._kept) > most:
            self._kept.popleft()[0].wait()


class _Copied:
    def __init__(self, event: torch.cuda.Event):
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
