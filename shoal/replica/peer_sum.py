"""Gradients of other processes of this host, read where their backward has put them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

try:
    from shoal.replica import _peer_sum as _native
except ImportError:
    _native = None  # type: ignore[assignment]

Exchange = Callable[[bytes], list[bytes]]
_CODES = {torch.float32: 7, torch.float64: 8}  # of transport/arithmetic.h
_ELEMENTS_OF_A_THREAD = 1 << 17


class PeerSum:
    """Adds up ranges of numbers that lie in the memory of each rank, in the order of ranks.

    `table` is memory that all ranks see: before `add` each one writes, with a barrier after it,
    where its ranges `runs` are now (`tell`).
    """

    def __init__(self, pids: Tensor, rank: int, runs: Sequence[slice], table: Tensor):
        self.rank = rank
        self._pids = pids.reshape(-1)
        self._runs = torch.tensor([[run.start, run.stop] for run in runs])
        self._table = table.view(-1, len(runs))
        self._addresses = torch.empty_like(self._table)

    def tell(self, tensors: Sequence[Tensor]) -> None:
        self._table[self.rank] = torch.tensor([tensor.data_ptr() for tensor in tensors])

    def learn(self) -> None:
        """All ranks have told."""
        self._addresses.copy_(self._table)

    def add(self, where: slice, out: Tensor) -> tuple[int, int]:
        """The sums of a range; or an error number, and the rank whose memory gave it."""
        size = where.stop - where.start
        error, lost = _native.add(
            out.data_ptr(),
            _CODES[out.dtype],
            self._pids.data_ptr(),
            self._addresses.data_ptr(),
            self._runs.data_ptr(),
            len(self._pids),
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
            of_one = PeerSum(pids[other], 1, [slice(0, 1)], addresses[other])
            of_one.learn()
            error, _ = of_one.add(slice(0, 1), found)
            able = not error and int(found.view(torch.int64)) == expected
    return pids if all(text == b"able" for text in exchange(b"able" if able else b"-")) else None
