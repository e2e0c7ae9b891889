"""How ranks meet in a store of torch's, which any process that reaches it can read and write.

Every value has a code (HMAC) under the secret of the run, if there is one: a value of a stranger or
of another key is an error. Once they have met, ranks with a secret move to a service of rank 0
(`client.py`), which admits no process without the key.

torchrun starts failed ranks again beside the same store, in which every key of the ranks before
them still is. So rank 0 draws a name, and each rank proves to be of its start before it gets it:

    rank r    hello/r       = a word it has just drawn      rank 0 reads it; it may be an old one
    rank 0    reply/WORD    = the name                      only that rank r waits for it
    rank r    here/NAME/r   = its word                      from now on keys begin with NAME

As long as rank r is not here, rank 0 looks whether there is another hello. A rank that gives up
leaves its sentence, and the others do not wait for it. What an earlier start left does not count,
so it writes it with a new word each time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shoal.errors import BadInput, ShoalError
from shoal.runtime.secret import CODE_BYTES, code_of, is_code
from shoal.runtime.waits import until


def own_generation(store: Store, rank: int, size: int, timeout_s: float = 1800.0) -> Store:
    """`store` below a name that these ranks share and no other start does; all ranks call it."""
    return PrefixStore(generation_name(store, rank, size, timeout_s), store)


def generation_name(
    store: Store | RendezvousStore, rank: int, size: int, timeout_s: float = 1800.0
) -> str:
    """That name, alone."""
    word = secrets.token_hex(16)
    if rank == 0:
        _tell_name(store, word, range(1, size), timeout_s)
        return word
    store.set(f"hello/{rank}", word)
    name = store.get(f"reply/{word}").decode(errors="replace")
    store.set(f"here/{name}/{rank}", word)
    return name


def _tell_name(
    store: Store | RendezvousStore, name: str, peers: Iterable[int], timeout_s: float
) -> None:
    """To the living process of every peer."""
    words = dict.fromkeys(peers, b"")

    def all_here() -> bool | None:
        for peer, known in list(words.items()):
            words[peer] = store.get(f"hello/{peer}")
            if words[peer] != known:
                store.set(f"reply/{words[peer].decode(errors='replace')}", name)
            if store.check([f"here/{name}/{peer}"]):
                del words[peer]
        return not words or None

    def missing() -> ShoalError:
        ranks = ", ".join(map(str, words))
        return ShoalError(f"rank 0 waits for rank {ranks}: started, or ended before it came?")

    until(all_here, nullcontext(), timeout_s, missing)


# ---------------------------------------------------------------------- ranks that give up

_KEY = "refused"
_HEARD = "heard refusal"
_WORD = 16  # characters that tell a sentence from the one before
_MOST_CHARACTERS = 2000
_WAIT_S = 1800.0
_REPEAT_S = 0.5
_UNTIL_HEARD_S = 20.0  # others may still import torch


class OtherRankRefused(BadInput):
    """Another rank has given up, with the reason that it left."""


class Refusals:
    """Reasons that ranks leave in a store for each other, from the moment this is made."""

    def __init__(self, store: Store, rank: int):
        self._store = store
        self._rank = rank
        self._before = self._read(_KEY)

    def leave(self, reason: str) -> str:
        """Returns the word by which it is known."""
        word = secrets.token_hex(_WORD // 2)
        sentence = f"rank {self._rank} has given up the rendezvous: {reason}"[:_MOST_CHARACTERS]
        with suppress(RuntimeError):  # the store has ended
            self._store.set(_KEY, word + sentence)
        return word

    def leave_until_heard(self, reason: str, size: int) -> None:
        """For ranks that may not look at the store yet."""
        deadline_s = time.monotonic() + _UNTIL_HEARD_S
        waiting = set(range(size)) - {self._rank}
        words: set[str] = set()
        with suppress(RuntimeError):  # the store has ended
            while waiting and time.monotonic() < deadline_s:
                words.add(self.leave(reason))
                time.sleep(_REPEAT_S)
                waiting = {rank for rank in waiting if self._read(f"{_HEARD}/{rank}") not in words}

    def check(self) -> None:
        """OtherRankRefused once a rank has left a reason."""
        text = self._read(_KEY)
        if text != self._before:
            self._store.set(f"{_HEARD}/{self._rank}", text[:_WORD])
            raise self._other(text[_WORD:])

    def ended(self) -> OtherRankRefused:
        """For a store that has ended with its process: one rank has failed before all had met.

        What it has left may have been there before this rank came.
        """
        return self._other(
            self._before[_WORD:]
            or "the store of the rendezvous has ended: the rank that failed first, on another "
            "host, says why"
        )

    def _other(self, sentence: str) -> OtherRankRefused:
        printable = "".join(char if char.isprintable() else " " for char in sentence)
        return OtherRankRefused(f"rank {self._rank}: {printable}")

    def _read(self, key: str) -> str:
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else ""


def leave_with_agent(rank: int, size: int, name: str, reason: str) -> None:
    """A reason for ranks of the run `name`, in the store of torchrun's agent, of one that has not
    come as far as to meet them."""
    with suppress(RuntimeError):  # the store has ended
        store = next(rendezvous("env://", rank, size))[0]
        Refusals(PrefixStore(name, store), rank).leave_until_heard(reason, size)


@contextmanager
def heeding_refusals(store: Store, rank: int) -> Iterator[Refusals]:
    """What fails in the block ends the block of every other rank."""
    refusals = Refusals(store, rank)
    try:
        yield refusals
    except OtherRankRefused:
        raise
    except DistNetworkError as error:
        raise refusals.ended() from error
    except BaseException as error:
        refusals.leave(str(error) or type(error).__name__)
        raise


# ---------------------------------------------------------------------- values with codes


class RendezvousStore:
    """What ranks write into `store` until all have met; `get` also ends when one has refused."""

    def __init__(self, store: Store, rank: int, secret: bytes | None, refusals: Refusals):
        self._store: Any = store  # torch's stubs have only text for values
        self._rank = rank
        self._secret = secret
        self._refusals = refusals

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def set(self, key: str, text: str) -> None:
        data = text.encode()
        code = b"" if self._secret is None else code_of(self._secret, "store", key.encode(), data)
        self._store.set(key, data + code)

    def get(self, key: str) -> bytes:
        def is_there() -> bool | None:
            """A store in C++ cannot be interrupted while it waits."""
            if not self._store.check([key]):
                self._refusals.check()
                return None
            return True

        late = f"no rank has written {key!r} into the rendezvous in {_WAIT_S:g}s"
        until(is_there, nullcontext(), _WAIT_S, lambda: ShoalError(late))
        value: bytes = self._store.get(key)
        if self._secret is None:
            return value
        data = value[:-CODE_BYTES]
        code = value[-CODE_BYTES:]
        if not is_code(code, self._secret, "store", key.encode(), data):
            number = key.rpartition("/")[2]
            writer = f"rank {number}" if number.isdecimal() and len(number) < 9 else "a rank"
            raise BadInput(
                f"rank {self._rank}: {key!r} in the store of the rendezvous was written by a "
                f"process that does not know the secret of this run: {writer} with another key or "
                "none, or a stranger (`shoal keys show` has to say the same on every host)"
            )
        return data


def check_secrets(store: RendezvousStore, has_secret: bool, rank: int, size: int) -> None:
    """BadInput where only some ranks have a secret; `store` asks for none. All ranks call it."""
    own = "given" if has_secret else "none"
    store.set(f"secret/{rank}", own)
    for peer in (peer for peer in range(size) if peer != rank):
        word = store.get(f"secret/{peer}").decode(errors="replace")
        if word not in ("none", "given"):
            raise BadInput(
                f"rank {rank}: what rank {peer} wrote into the store of the rendezvous was "
                "overwritten by another process: start again where only these ranks reach "
                "MASTER_PORT"
            )
        if word != own:
            raise BadInput(
                f"rank {rank}: rank {rank if word == 'given' else peer} has no secret, and other "
                "ranks have one: copy the key of `shoal keys new` to every host, or give "
                "SHOAL_SECRET (or SHOAL_SECRET_FILE) to all ranks or to none"
            )
