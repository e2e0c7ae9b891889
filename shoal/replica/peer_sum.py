"""Gradients of other processes of this host, read where their backward has put them."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

try:
    from shoal.replica import _peer_sum as _native
except ImportError:
    _native = None  # type: ignore[assignment]

Exchange = Callable[[bytes], list[bytes]]
_CODES = {torch.float32: 7, torch.float64: 8}  # of comm/transport/arithmetic.h
_ELEMENTS_OF_A_THREAD = 1 << 17
_BLOCKS_OF_A_RANK = 8
_LINE = 8  # numbers of 64 bits


class PeerSum:
    """Adds up what lies in the memory of each rank, in the order of ranks.

    Whichever worker has ended its backward takes the next block.

        [ a line of each rank: how many buckets it has told | the next block | addresses ]

    `table` is memory that all ranks see. Each tells where its ranges `runs` of a bucket are now.
    """

    def __init__(self, pids: Tensor, rank: int, buckets: Sequence[list[slice]], table: Tensor):
        size = len(pids)
        runs = [run for of_bucket in buckets for run in of_bucket]
        self._peers = Peers(pids, rank, runs, table[(size + 1) * _LINE :])
        self._starts = [0, *itertools.accumulate(map(len, buckets))]
        self._flags = table.data_ptr()
        self._told = 0
        self._own, self._next = (self._flags + 8 * _LINE * each for each in (rank, size))
        elements = sum(run.stop - run.start for run in runs)
        each = max(_ELEMENTS_OF_A_THREAD, elements // (_BLOCKS_OF_A_RANK * size))
        self._blocks = [
            (bucket, slice(start, min(start + each, run.stop)))
            for bucket, of_bucket in enumerate(buckets)
            for run in of_bucket
            for start in range(run.start, run.stop, each)
        ]
        self.add = self._peers.add

    @staticmethod
    def table_bytes(ranks: int, runs: int) -> int:
        return 8 * (_LINE * (ranks + 1) + ranks * runs)

    def tell(self, tensors: Sequence[Tensor]) -> None:
        """Where the gradients of the next bucket are."""
        at = self._starts[self._told]
        own = self._peers.table[self._peers.rank, at : at + len(tensors)]
        own.copy_(torch.tensor([tensor.data_ptr() for tensor in tensors]))
        self._told += 1
        _native.put(self._own, self._told)

    def has(self, bucket: int, patience_ns: int) -> bool:
        """Whether all ranks have told it, or do soon."""
        return _native.reached(self._flags, len(self._peers.pids), bucket + 1, patience_ns)

    def blocks(self) -> Iterator[tuple[int, slice]]:
        """Parts of buckets that no other rank takes."""
        while (number := _native.next(self._next)) < len(self._blocks):
            yield self._blocks[number]

    def begin(self) -> None:
        """All ranks have added up, and none begins before a barrier."""
        self._told = 0
        _native.put(self._own, 0)
        if self._peers.rank == 0:
            _native.put(self._next, 0)


class Peers:
    """Memory of several processes, whose addresses of the ranges `runs` are in `table`."""

    def __init__(self, pids: Tensor, rank: int, runs: Sequence[slice], table: Tensor):
        self.rank = rank
        self.pids = pids.reshape(-1)
        self._runs = torch.tensor([[run.start, run.stop] for run in runs])
        self.table = table.view(-1, len(runs))

    def add(self, where: slice, out: Tensor) -> tuple[int, int]:
        """The sums of a range; or an error number, and the rank whose memory gave it."""
        size = where.stop - where.start
        error, lost = _native.add(
            out.data_ptr(),
            _CODES[out.dtype],
            self.pids.data_ptr(),
            self.table.data_ptr(),
            self._runs.data_ptr(),
            len(self.pids),
            self.rank,
            len(self._runs),
            where.start,
            where.stop,
            min(torch.get_num_threads(), 1 + size // _ELEMENTS_OF_A_THREAD),
        )
        return error, lost - 1


def mix(out: Tensor, terms: Sequence[tuple[Tensor, float]]) -> bool:
    """`out` becomes the weighted sum in one pass, to the bit as by torch; False: it cannot here."""
    if _native is None or out.dtype not in _CODES:
        return False
    pairs = [(tensor.data_ptr(), weight) for tensor, weight in terms]
    threads = min(torch.get_num_threads(), 1 + out.numel() // _ELEMENTS_OF_A_THREAD)
    return _native.mix(out.data_ptr(), _CODES[out.dtype], pairs, out.numel(), threads)


def readable_peers(exchange: Exchange) -> Tensor | None:
    """The processes of all ranks; None on all of them if one cannot read the memory of another.

    A collective call. Yama, where it is in force, lets a process be read by descendants of one
    that it names: the parent of all workers.
    """
    word = torch.tensor([secrets.randbits(62)])
    if _native is not None:
        _native.let_read(os.getppid())
    told = exchange(f"{os.getpid()} {word.data_ptr()} {int(word)}".encode())
    pids, addresses, words = torch.tensor(
        [[int(number) for number in text.split()] for text in told]
    ).T.contiguous()
    # `word` of each rank is read as it is: one number, and nothing is added to it
    able = _native is not None
    for other, expected in enumerate(words.tolist()):
        found = torch.zeros(1, dtype=torch.float64)
        if able:
            error, _ = Peers(pids[other], 1, [slice(0, 1)], addresses[other]).add(
                slice(0, 1), found
            )
            able = not error and int(found.view(torch.int64)) == expected
    return pids if all(text == b"able" for text in exchange(b"able" if able else b"-")) else None
