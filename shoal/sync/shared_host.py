"""Which workers share their weights: those of one host that train in lockstep with plain updates.

On several hosts with equally many workers each there is one copy a host, and worker i of each of
them updates the same slice, whose gradients they add up.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shoal.comm.group import Group, Op
from shoal.comm.objects import all_gather_bytes
from shoal.comm.transport.shm import memfd
from shoal.replica.flat_params import FlatParams
from shoal.replica.optimizers import LooksAt, has_hooks, looks_at
from shoal.replica.peer_sum import PeerSum, readable_peers
from shoal.schedules.buffer_layout import LARGE_BYTES, SHARED_BYTES
from shoal.sync import Replica
from shoal.sync.optimizer_step import make_optimizer

_ALIGN = 16  # elements: slices begin with a cache line
_PAGE_WORD = 8  # bytes of /proc/self/pagemap


def pays(flat: FlatParams, group: Group, wanted: bool | None) -> bool:
    """Whether workers may share weights, and gain by it; `wanted` is the strategy's word.

    The same on all ranks.
    """
    if group.size == 1 or flat.device.type != "cpu" or not group.executor.may_share:
        return False
    return flat.data.nbytes >= SHARED_BYTES if wanted is None else wanted


def takes_slices(optimizer: torch.optim.Optimizer) -> bool:
    """Whether optimizers of slices do what this one does, with state that is plain."""
    return (
        type(optimizer).__module__.startswith("torch.optim.")
        and looks_at(optimizer) is LooksAt.ELEMENT
        and not has_hooks(optimizer)
    )


@dataclass(frozen=True)
class HostGroup:
    """The ranks of this host, and those of the same index on all hosts, if there are several."""

    local: Group
    across: Group | None = None

    @classmethod
    def of(cls, group: Group) -> HostGroup | None:
        """None where hosts are uneven, or nothing is shared. All ranks call it."""
        topology = group.executor.topology
        if topology is None or len(topology.hosts) == 1:
            return cls(group)
        if not topology.is_even or len(topology.local) == 1:
            return None
        columns = list(zip(*topology.hosts, strict=True))
        groups = [group.subgroup(ranks) for ranks in (*topology.hosts, *columns)]
        local, across = [one for one in groups if one is not None]
        return cls(local, across)


class PrivatePages:
    """A private mapping of shared memory (copy on write), and whether it was written."""

    def __init__(self, fd: int, offset: int, num_bytes: int):
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self.memory = mmap.mmap(fd, num_bytes, mmap.MAP_PRIVATE, access, offset=offset)
        address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self._where = address // mmap.PAGESIZE * _PAGE_WORD
        self._length = -(-num_bytes // mmap.PAGESIZE) * _PAGE_WORD
        self._map = open("/proc/self/pagemap", "rb", buffering=0)  # noqa: SIM115
        self.memory[0] = self.memory[0]
        self.can_tell = self.are_written()
        self.give_back()
        self.can_tell &= not self.are_written()

    def are_written(self) -> bool:
        """Whether a page is this process's own: it is there, or swapped out, and of no file."""
        words = os.pread(self._map.fileno(), self._length, self._where)
        if len(words) < self._length:
            return True
        state = torch.frombuffer(bytearray(words), dtype=torch.int64) >> 61 & 7
        return bool((state & 1 == 0).logical_and_(state & 6 != 0).any())

    def give_back(self) -> None:
        """What was written is forgotten: the mapping shows the shared memory again."""
        self.memory.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self._map.close()


@dataclass(frozen=True)
class HostMemory:
    """[ where the gradients of each rank are | weights | sums ], and this rank's weights."""

    memory: mmap.mmap
    weights_at: int
    pages: PrivatePages
    pids: Tensor

    @classmethod
    def of(cls, group: Group, flat: FlatParams) -> HostMemory | None:
        """None where processes cannot share memory, or not read each other's. All ranks call it."""
        exchange = partial(all_gather_bytes, group)
        if (pids := readable_peers(exchange)) is None:
            return None
        table_bytes = PeerSum.table_bytes(group.size, len(flat.grads.runs()))
        start = mmap.PAGESIZE + whole_pages(table_bytes)
        length = whole_pages(flat.data.nbytes)
        num_bytes = start + 2 * length
        fd = memfd.share(exchange, group.rank, num_bytes, memfd.new_generation())
        if fd is None:
            return None
        try:
            with suppress(OSError):
                pages = PrivatePages(fd, start, length)
                return cls(memfd.map_all(fd, num_bytes), start, pages, pids)
        finally:
            os.close(fd)
        return None


def whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def share(
    replica: Replica, buckets: list[slice], wanted: bool | None
) -> tuple[HostGroup, HostMemory] | None:
    """None on all ranks, where the strategy or the model is not for it or a host has no memory.

    Else this rank has an optimizer of all parameters.
    """
    flat = replica.flat
    update = replica.update
    if not (replica.is_whole and pays(flat, replica.group, wanted) and flat.header_fits):
        return None
    whole = update.optimizer  # where each rank owns a shard of the state, its own is of that shard
    if len(update.named) != len(flat.named):
        whole = make_optimizer(update.factory, flat.named)
    if update.scaler is not None or not takes_slices(whole):
        return None
    if any(p.is_complex() for p in flat.params):
        return None
    host = HostGroup.of(replica.group)
    if host is None:
        return None
    flat.grads.watch(buckets, LARGE_BYTES)
    memory = HostMemory.of(host.local, flat)
    able = torch.tensor(float(memory is not None and memory.pages.can_tell))
    replica.group.all_reduce(able, Op.MIN).wait()
    if not able:
        if memory is not None:
            memory.pages.close()
        return None
    assert memory is not None
    if whole is not update.optimizer:
        update.take_shard(flat.named, [], whole)
    return host, memory
