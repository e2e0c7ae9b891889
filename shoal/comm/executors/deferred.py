"""An executor of workers that start apart: the executor of all ranks is made only when needed.

    rank 0   is killed before it has written anything; the launcher notes that it has exited
    rank 1   the lowest surviving rank: writes its tensor
    rank 2   reads what rank 1 has written

What such strategies do at their start is a broadcast, through files in a folder that all ranks
see; it does not wait for ranks that have exited. For everything else the executor of all ranks is
made, for which all of them have to be there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.comm.call import Call, PeerMessage
from shoal.comm.executor import Executor
from shoal.comm.transport.transport import DoneWork, Work
from shoal.errors import Desync
from shoal.runtime.files import write_atomically
from shoal.runtime.waits import until, waiting


class Deferred(Executor):
    """`has_exited(rank)` must be true only when that rank will write nothing more.

    A broadcast writes and reads a file of the tensor's size; the last reader removes it.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        has_exited: Callable[[int], bool],
        make: Callable[[], Executor],
        keeps: bool = False,
    ):
        """With `keeps` broadcasts stay, for workers that come later and call the same ones."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self.rank = rank
        self.size = size
        self._has_exited = has_exited
        self._make = make
        self._keeps = keeps
        self._made: Executor | None = None
        self._timed = False
        self._round = 0

    @property
    def executor(self) -> Executor:
        """The executor of all ranks."""
        if self._made is None:
            self._made = self._make()
            if self._timed:
                self._made.record_times()
        return self._made

    def submit(self, call: Call) -> Work:
        if call.kind != "broadcast":
            return self.executor.submit(call)
        assert isinstance(call.data, Tensor)
        self._broadcast(call.data, call.root)
        return DoneWork()

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        return self.executor.send(data, dst, tag)

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        return self.executor.recv(into, src, tag)

    def exchange(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage]) -> Work:
        return self.executor.exchange(sends, receives)

    def split(self, ranks: Sequence[int]) -> Executor | None:
        return self.executor.split(ranks)

    def record_times(self) -> None:
        self._timed = True

    def _broadcast(self, data: Tensor, root: int) -> None:
        """From the root; if it has exited before it wrote, from the lowest surviving rank."""
        self._round += 1
        order = [root, *(r for r in range(self.size) if r != root)]
        before = order[: order.index(self.rank)]
        path = self._path("given")

        def has_data() -> bool | None:
            is_writer = all(self._has_exited(r) for r in before)  # first: then the file is final
            if path.exists():
                self._read(path, data)
            elif is_writer:
                self._write(path, data)
            else:
                return None
            return True

        wait = waiting(f"rank {self.rank}", f"rank {root}", "a broadcast by files")
        until(has_data, wait, math.inf, AssertionError)
        if not self._keeps:
            self._remove_if_last(path)

    def _write(self, path: Path, data: Tensor) -> None:
        """The first one counts: the root may come back when another rank has taken its part."""
        own = self._path(f"from-{self.rank}")
        write_atomically(own, _memory(data.detach().cpu().contiguous()))
        try:
            os.link(own, path)
        except FileExistsError:
            self._read(path, data)
        own.unlink()

    def _read(self, path: Path, data: Tensor) -> None:
        received = torch.empty_like(data, device="cpu", memory_format=torch.contiguous_format)
        flat = _memory(received)
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            if length != flat.nbytes:
                mine = f"a broadcast of {flat.nbytes} bytes"
                theirs = f"a broadcast of {length} bytes"
                raise Desync(self.rank, mine, 0, theirs)
            file.readinto(flat)
        data.detach().copy_(received.view(data.shape))

    def _remove_if_last(self, path: Path) -> None:
        self._path(f"have-{self.rank}").touch()
        others = (r for r in range(self.size) if r != self.rank)
        if all(self._path(f"have-{r}").exists() or self._has_exited(r) for r in others):
            path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._round}-{name}"


def _memory(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)
