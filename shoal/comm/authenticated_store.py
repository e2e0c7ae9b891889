"""A torch store whose values are proven with the secret of the run.

Any process that reaches a TCPStore can read and write it. Here every value has a code (HMAC) over
its key, and once ranks have met over the nonces of all of them, so a value of a stranger, of
another key or of another run is an error. Counters (`add`) have none: torch only counts arrivals
with them.
"""

from __future__ import annotations

from torch.distributed.distributed_c10d import Store

from shoal.comm.generation import own_generation
from shoal.comm.refusals import by_a_stranger
from shoal.comm.store_wrapper import StoreWrapper
from shoal.errors import BadInput
from shoal.runtime.proof import fresh_nonce, is_proof, proof

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
        self._store.set(key, data + proof(self._key, "store", key.encode(), data))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        signed = self._store.get(key)
        data, code = signed[:-_CODE_BYTES], signed[-_CODE_BYTES:]
        if not is_proof(code, self._key, "store", key.encode(), data):
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
    return AuthenticatedStore(started, proof(secret, "nonces", *nonces), rank, below=signed)


def _exchange(store: Store, what: str, own: bytes, rank: int, size: int) -> list[bytes]:
    """By rank. What others make of this rank's word does not count here."""
    store.set(f"{what}/{rank}", own)  # type: ignore[arg-type]
    return [own if peer == rank else store.get(f"{what}/{peer}") for peer in range(size)]
