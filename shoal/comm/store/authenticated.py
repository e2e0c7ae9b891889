"""A torch store whose values are proven with the secret of the run.

Any process that reaches a TCPStore can read and write it. Here every value has a code (HMAC) over
its key, and once ranks have met over the nonces of all of them, so a value of a stranger, of
another key or of another run is an error. Counters (`add`) have none: torch only counts arrivals
with them.

A rank that gives up before all have met leaves its sentence there, with a code, and the others do
not wait for it. What an earlier start left does not count, so such a rank writes it again and
again, each time with another nonce, until all have heard it.

torchrun starts failed ranks again beside the same store, in which every key of the ranks before
them still is. So rank 0 draws a name, and each rank proves to be of its start before it gets it:

    rank r    hello/r       = a word it has just drawn      rank 0 reads it; it may be an old one
    rank 0    reply/WORD    = the name                      only that rank r waits for it
    rank r    here/NAME/r   = its word                      from now on keys begin with NAME

As long as rank r is not here, rank 0 looks whether there is another hello.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shoal.errors import BadInput, ShoalError
from shoal.runtime.greeting import NONCE_BYTES, code_of, fresh_nonce, is_code
from shoal.runtime.waits import Backoff

_FIRST_LOOK_S = 0.001
_LONGEST_LOOK_S = 0.05


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
    pause = Backoff(_FIRST_LOOK_S, _LONGEST_LOOK_S)
    while words:
        for peer, known in words.items():
            words[peer] = store.get(f"hello/{peer}")
            if words[peer] != known:
                store.set(f"reply/{words[peer].decode(errors='replace')}", name)
        words = {
            peer: word for peer, word in words.items() if not store.check([f"here/{name}/{peer}"])
        }
        if not words:
            return
        if time.monotonic() > deadline_s:
            missing = ", ".join(map(str, words))
            raise ShoalError(f"rank 0 waits for rank {missing}: started, or ended before it came?")
        pause()


class StoreWrapper(Store):
    """As `store`, but for `set`, `get` and `clone`. Keep a reference: torch does not."""

    def __init__(self, store: Store):
        super().__init__()
        self._store = store

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()


_KEY = "refused"
_HEARD = "heard refusal"
_MOST_BYTES = 2000  # of a sentence
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.1
_WAIT_S = 1800.0
_REPEAT_S = 0.5
_UNTIL_HEARD_S = 20.0  # others may still import torch
_CLAIM = re.compile(rb"rank ([0-9]{1,8}) has given up")


class OtherRankRefused(BadInput):
    """Another rank has given up, with the reason that it left."""


def by_a_stranger(rank: int, key: str, writer: str) -> str:
    """What `rank` says of a value in the store that was written without the secret."""
    return (
        f"rank {rank}: {key!r} in the store of the rendezvous was written by a process that does "
        f"not know the secret of this run: {writer} with another key or none, or a stranger "
        "(`shoal keys show` has to say the same on every host)"
    )


class Refusals:
    """Reasons that ranks leave in a store for each other, from the moment this is made."""

    def __init__(self, store: Store, secret: bytes | None, rank: int):
        self._store = store
        self._secret = secret or b""
        self._rank = rank
        self._before = self._read()

    def leave(self, reason: str) -> bytes:
        """Returns the nonce by which it is known."""
        nonce = fresh_nonce()
        sentence = f"rank {self._rank} has given up the rendezvous: {reason}"
        data = nonce + sentence.encode()[:_MOST_BYTES]
        with suppress(RuntimeError):  # the store has ended
            self._store.set(_KEY, data + code_of(self._secret, _KEY, data))  # type: ignore[arg-type]
        return nonce

    def leave_until_heard(self, reason: str, size: int) -> None:
        """For ranks that may not look at the store yet."""
        deadline_s = time.monotonic() + _UNTIL_HEARD_S
        waiting = set(range(size)) - {self._rank}
        nonces: set[bytes] = set()
        with suppress(RuntimeError):  # the store has ended
            while waiting and time.monotonic() < deadline_s:
                nonces.add(self.leave(reason))
                time.sleep(_REPEAT_S)
                waiting = {rank for rank in waiting if self._heard_by(rank) not in nonces}

    def _heard_by(self, rank: int) -> bytes:
        key = f"{_HEARD}/{rank}"
        return self._store.get(key) if self._store.check([key]) else b""

    def check(self) -> None:
        """OtherRankRefused once a rank has left a reason."""
        value = self._read()
        if value != self._before:
            self._store.set(f"{_HEARD}/{self._rank}", value[:NONCE_BYTES])  # type: ignore[arg-type]
            raise OtherRankRefused(self._sentence(value))

    def ended(self) -> OtherRankRefused:
        """For a store that has ended with its process: one rank has failed before all had met.

        What it has left may have been there before this rank came.
        """
        if self._before:
            return OtherRankRefused(self._sentence(self._before))
        return OtherRankRefused(
            f"rank {self._rank}: the store of the rendezvous has ended: the rank that failed "
            "first, on another host, says why"
        )

    def _sentence(self, value: bytes) -> str:
        data, code = value[:-_CODE_BYTES], value[-_CODE_BYTES:]
        if not is_code(code, self._secret, _KEY, data):
            claim = _CLAIM.match(data, NONCE_BYTES)
            writer = f"rank {claim[1].decode()}" if claim else "a rank"
            return by_a_stranger(self._rank, _KEY, writer)
        text = data[NONCE_BYTES:].decode(errors="replace")
        printable = "".join(char if char.isprintable() else " " for char in text)
        return f"rank {self._rank}: {printable}"

    def _read(self) -> bytes:
        return self._store.get(_KEY) if self._store.check([_KEY]) else b""


def leave_with_agent(rank: int, size: int, name: str, reason: str) -> None:
    """A reason for ranks of the run `name`, in the store of torchrun's agent, of one that has not
    come as far as to meet them."""
    with suppress(RuntimeError):  # the store has ended
        store = next(rendezvous("env://", rank, size))[0]
        Refusals(PrefixStore(name, store), None, rank).leave_until_heard(reason, size)


class HeedingStore(StoreWrapper):
    """As `store`; until `is_over`, `get` also ends when another rank has refused."""

    def __init__(self, store: Store, refusals: Refusals):
        super().__init__(store)
        self._refusals = refusals
        self._clones: list[Store] = []
        self.is_over = False

    def get(self, key: str) -> bytes:
        if not self.is_over:
            self._await(key)
        return self._store.get(key)

    def _await(self, key: str) -> None:
        """A store in C++ cannot be interrupted while it waits."""
        deadline_s = time.monotonic() + _WAIT_S
        pause = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self._is_there(key):
            if time.monotonic() > deadline_s:
                raise ShoalError(f"no rank has written {key!r} into the rendezvous in {_WAIT_S:g}s")
            pause()

    def _is_there(self, key: str) -> bool:
        if self._store.check([key]):
            return True
        self._refusals.check()
        return False

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]

    def clone(self) -> Store:
        self._clones.append(self._store.clone())  # type: ignore[attr-defined]
        return self._clones[-1]


@contextmanager
def heeding_refusals(store: Store, secret: bytes | None, rank: int) -> Iterator[Refusals]:
    """What fails in the block ends the block of every other rank."""
    refusals = Refusals(store, secret, rank)
    try:
        yield refusals
    except OtherRankRefused:
        raise
    except DistNetworkError as error:
        raise refusals.ended() from error
    except BaseException as error:
        refusals.leave(str(error) or type(error).__name__)
        raise


_CODE_BYTES = 32


class AuthenticatedStore(StoreWrapper):
    """Values of `store` under `key`.

    `below` is another store in Python to which `store` leads. `rank` is this one.
    """

    def __init__(self, store: Store, key: bytes, rank: int, below: Store | None = None):
        super().__init__(store)
        self._rank = rank
        self._key = key
        self._kept = [] if below is None else [below]

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, data + code_of(self._key, "store", key.encode(), data))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        signed = self._store.get(key)
        data, code = signed[:-_CODE_BYTES], signed[-_CODE_BYTES:]
        if not is_code(code, self._key, "store", key.encode(), data):
            raise BadInput(by_a_stranger(self._rank, key, _writer_of(key)))
        return data

    def clone(self) -> Store:
        clone = AuthenticatedStore(self._store.clone(), self._key, self._rank)  # type: ignore[attr-defined]
        self._kept.append(clone)
        return clone


def _writer_of(key: str) -> str:
    """The rank that writes it, where its name ends with one: hello/1."""
    number = key.rpartition("/")[2]
    return f"rank {number}" if number.isdecimal() and len(number) < 9 else "a rank"


def authenticated(store: Store, secret: bytes | None, rank: int, size: int) -> Store:
    """The store of one start of these ranks, proven if they have a secret; all ranks call it."""
    own = b"none" if secret is None else b"given"
    told = _exchange(store, "secret", own, rank, size)
    for peer, word in enumerate(told):
        if word not in (b"none", b"given"):
            raise BadInput(
                f"rank {rank}: what rank {peer} wrote into the store of the rendezvous was "
                "overwritten by another process: start again where only these ranks reach "
                "MASTER_PORT"
            )
    if len(set(told)) > 1 or own not in told:
        lacking = [peer for peer, word in enumerate(told) if word != b"given"]
        raise BadInput(
            f"rank {rank}: rank {lacking[0]} has no secret, and other ranks have one: copy the key "
            "of `shoal keys new` to every host, or give SHOAL_SECRET (or SHOAL_SECRET_FILE) to all "
            "ranks or to none"
        )
    if secret is None:
        return own_generation(store, rank, size)
    signed = AuthenticatedStore(store, secret, rank)
    started = own_generation(signed, rank, size)
    nonces = _exchange(started, "nonce", fresh_nonce(), rank, size)
    return AuthenticatedStore(started, code_of(secret, "nonces", *nonces), rank, below=signed)


def _exchange(store: Store, what: str, own: bytes, rank: int, size: int) -> list[bytes]:
    """By rank. What others make of this rank's word does not count here."""
    store.set(f"{what}/{rank}", own)  # type: ignore[arg-type]
    return [own if peer == rank else store.get(f"{what}/{peer}") for peer in range(size)]
