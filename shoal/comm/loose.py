"""A group for strategies that need nobody in particular: it does not wait for ranks that are gone.

    rank 0   is killed before it has given anything; the launcher notes that it is gone
    rank 1   the first that is left: gives its own
    rank 2   takes what rank 1 gives

Only what such strategies do at their start is here: a broadcast, by way of files in a folder that
all ranks see. For everything else a whole group is made, which all ranks have to come to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.comm.elastic import FIRST_LOOK_S, LONGEST_LOOK_S
from shoal.comm.group import Group, Op, check_subgroup
from shoal.errors import Desync
from shoal.runtime.backoff import Pauses
from shoal.transport.threads import DoneWork
from shoal.transport.transport import Work


class LooseGroup:
    """`is_gone(rank)` must say yes only when that rank will write nothing more.

    A broadcast writes and reads a file of the tensor's size; it is gone when all have read it.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        is_gone: Callable[[int], bool],
        make_whole: Callable[[], Group],
    ):
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self.rank = rank
        self.size = size
        self._is_gone = is_gone
        self._make_whole = make_whole
        self._whole: Group | None = None
        self._round = 0

    def broadcast(self, data: Tensor, root: int = 0) -> Work:
        """From the root; if it is gone and has given nothing, from the first that is left."""
        self._round += 1
        before = [root, *(r for r in range(self.size) if r != root)]
        before = before[: before.index(self.rank)]
        path = self._path("given")
        pause = Pauses(FIRST_LOOK_S, LONGEST_LOOK_S)
        while True:
            alone = all(self._is_gone(r) for r in before)  # first: then what they gave is final
            if path.exists():
                self._take(path, data)
                break
            if alone:
                self._give(path, data)
                break
            pause()
        self._tidy(path)
        return DoneWork()

    def _give(self, path: Path, data: Tensor) -> None:
        part = path.with_suffix(".part")
        part.write_bytes(_memory(data.detach().cpu().contiguous()))
        os.replace(part, path)

    def _take(self, path: Path, data: Tensor) -> None:
        whole = torch.empty_like(data, device="cpu", memory_format=torch.contiguous_format)
        flat = _memory(whole)
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            if length != flat.nbytes:
                mine, theirs = (f"a broadcast of {n} bytes" for n in (flat.nbytes, length))
                raise Desync(self.rank, mine, 0, theirs)
            file.readinto(flat)
        data.detach().copy_(whole.view(data.shape))

    def _tidy(self, path: Path) -> None:
        self._path(f"have-{self.rank}").touch()
        others = (r for r in range(self.size) if r != self.rank)
        if all(self._path(f"have-{r}").exists() or self._is_gone(r) for r in others):
            path.unlink(missing_ok=True)

    def _path(self, what: str) -> Path:
        return self._folder / f"{self._round}-{what}"

    # ------------------------------------------------------------------ what needs everybody

    @property
    def whole(self) -> Group:
        if self._whole is None:
            self._whole = self._make_whole()
        return self._whole

    def send(self, data: Tensor, dst: int, tag: int = 0) -> Work:
        return self.whole.send(data, dst, tag)

    def recv(self, into: Tensor, src: int, tag: int = 0) -> Work:
        return self.whole.recv(into, src, tag)

    def reduce(self, data: Tensor, root: int = 0, op: Op = Op.SUM) -> Work:
        return self.whole.reduce(data, root, op)

    def all_reduce(self, data: Tensor, op: Op = Op.SUM) -> Work:
        return self.whole.all_reduce(data, op)

    def gather(self, out: Tensor | None, data: Tensor, root: int = 0) -> Work:
        return self.whole.gather(out, data, root)

    def scatter(self, out: Tensor, data: Tensor | None, root: int = 0) -> Work:
        return self.whole.scatter(out, data, root)

    def all_gather(self, out: Tensor, data: Tensor) -> Work:
        return self.whole.all_gather(out, data)

    def reduce_scatter(self, out: Tensor, data: Tensor, op: Op = Op.SUM) -> Work:
        return self.whole.reduce_scatter(out, data, op)

    def all_to_all(self, out: Tensor, data: Tensor) -> Work:
        return self.whole.all_to_all(out, data)

    def scan(self, data: Tensor, op: Op = Op.SUM) -> Work:
        return self.whole.scan(data, op)

    def barrier(self) -> Work:
        return self.whole.barrier()

    def duplicate(self) -> Group:
        return self.whole.duplicate()

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        check_subgroup(ranks, self.size)
        return self.whole.subgroup(ranks)


def _memory(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)
