"""A part of a torch store that only the ranks of one start use.

torchrun starts failed ranks again beside the same store, in which every key of the ranks before
them still is. So rank 0 draws a name, and each rank proves to be of its start before it gets it:

    rank r    hello/r       = a word it has just drawn      rank 0 reads it; it may be an old one
    rank 0    reply/WORD    = the name                      only that rank r waits for it
    rank r    here/NAME/r   = its word                      from now on keys begin with NAME

As long as rank r is not here, rank 0 looks whether there is another hello.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable

from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.errors import ShoalError
from shoal.runtime.waits import Backoff

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05


def own_generation(store: Store, rank: int, size: int, timeout_s: float = 1800.0) -> Store:
    """`store` below a name that these ranks share and no other start does; all ranks call it."""
    return PrefixStore(generation_name(store, rank, size, timeout_s), store)


def generation_name(store: Store, rank: int, size: int, timeout_s: float = 1800.0) -> str:
    """That name, alone."""
    word = secrets.token_hex(16)
    if rank == 0:
        _name(store, word, range(1, size), time.monotonic() + timeout_s)
        return word
    store.set(f"hello/{rank}", word)
    name = store.get(f"reply/{word}").decode(errors="replace")
    store.set(f"here/{name}/{rank}", word)
    return name


def _name(store: Store, name: str, peers: Iterable[int], deadline_s: float) -> None:
    """Tell `name` to the living process of every peer."""
    words = dict.fromkeys(peers, b"")
    pause = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while words:
        for peer, known in words.items():
            words[peer] = store.get(f"hello/{peer}")
            if words[peer] != known:
                store.set(f"reply/{words[peer].decode(errors='replace')}", name)
        words = {peer: word for peer, word in words.items() if not _is_here(store, name, peer)}
        if not words:
            return
        if time.monotonic() > deadline_s:
            missing = ", ".join(map(str, words))
            raise ShoalError(f"rank 0 waits for rank {missing}: started, or ended before it came?")
        pause()


def _is_here(store: Store, name: str, peer: int) -> bool:
    return store.check([f"here/{name}/{peer}"])
