"""A store that strangers can write to: what they write is an error, never a value."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.comm.store.authenticated import (
    AuthenticatedStore,
    HeedingStore,
    OtherRankRefused,
    Refusals,
    authenticated,
    heeding_refusals,
)
from shoal.errors import BadInput, ShoalError
from shoal.runtime.secret import new_secret

SECRET = new_secret()


def opened(open_store: Store, *secrets: bytes | None) -> list[Store]:
    """The store as each rank sees it."""
    with ThreadPoolExecutor(len(secrets)) as pool:
        size = len(secrets)
        stores = [
            pool.submit(authenticated, open_store, secret, rank, size)
            for rank, secret in enumerate(secrets)
        ]
        return [store.result() for store in stores]


def test_ranks_read_what_ranks_have_written() -> None:
    one, two = opened(HashStore(), SECRET, SECRET)
    one.set("key", "text")
    one.set("empty", "")
    assert two.get("key") == b"text"
    assert two.get("empty") == b""
    assert two.add("count", 2) == 2


def test_what_a_stranger_writes_is_refused() -> None:
    open_store = HashStore()
    two = AuthenticatedStore(open_store, SECRET, 0)
    two.set("key", "text")
    signed = open_store.get("key")
    for forged in (b"", b"text", b"Text" + signed[4:], signed[:-1], bytes(40), b"\xff" * 5):
        open_store.set("key", forged)  # type: ignore[arg-type]
        with pytest.raises(ShoalError, match=r"'key' .* does not know the secret of this run"):
            two.get("key")
    open_store.set("other key", signed)  # type: ignore[arg-type]
    with pytest.raises(ShoalError, match="other key"):
        two.get("other key")


def test_values_of_another_run_with_the_same_secret_are_refused() -> None:
    before = opened(HashStore(), SECRET, SECRET)[0]
    now = opened(HashStore(), SECRET, SECRET)[0]
    assert isinstance(before, AuthenticatedStore)
    assert isinstance(now, AuthenticatedStore)
    before.set("key", "old")
    now._store.set("key", before._store.get("key"))  # type: ignore[arg-type]
    with pytest.raises(ShoalError, match="does not know the secret"):
        now.get("key")


def test_without_a_secret_the_store_is_as_it_was() -> None:
    one, two = opened(HashStore(), None, None)
    one.set("key", "text")
    assert two.get("key") == b"text"
    assert not isinstance(two, AuthenticatedStore)


def test_a_secret_that_only_some_ranks_have_is_an_error() -> None:
    with pytest.raises(BadInput, match=r"rank 1 has no secret.* SHOAL_SECRET"):
        opened(HashStore(), SECRET, None)


@pytest.mark.parametrize(
    ("key", "word", "said"),
    [
        ("secret/1", "none", "rank 1 has no secret"),
        ("secret/1", "overwritten", r"what rank 1 wrote .* was overwritten"),
        ("secret/1", "\xff" * 9, None),
        ("hello/1", "\xff" * 9, None),
    ],
)
def test_a_stranger_who_comes_before_the_ranks_have_met_is_refused(
    key: str, word: str, said: str | None
) -> None:
    open_store = HashStore()
    open_store.set("secret/1", "given")
    open_store.set(key, word)
    with pytest.raises(ShoalError, match=said):
        authenticated(open_store, SECRET, 0, 2)


def test_gloo_finds_its_peers_through_it() -> None:
    stores = opened(HashStore(), SECRET, SECRET)
    assert all(isinstance(store, AuthenticatedStore) for store in stores)

    def body(rank: int) -> list[float]:
        device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")  # type: ignore[attr-defined]
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo", stores[rank]), rank, 2, options)  # type: ignore[call-overload]
        data = torch.ones(3) * (rank + 1)
        gloo.allreduce([data]).wait()
        return list(data.tolist())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(body, range(2))) == [[3.0] * 3] * 2


def refused(store: Store, heard: list[str], secret: bytes | None, rank: int) -> None:
    """A rank that waits for a value which does not come."""
    try:
        with heeding_refusals(store, secret, rank) as refusals:
            HeedingStore(store, refusals).get("what does not come")
    except BadInput as error:
        heard.append(str(error))


def fail_to_meet(store: Store, secret: bytes | None, rank: int) -> None:
    with pytest.raises(BadInput, match="no port"), heeding_refusals(store, secret, rank):
        raise BadInput("no port")


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "none"])
def test_ranks_do_not_wait_for_one_that_has_given_up(secret: bytes | None) -> None:
    store = HashStore()
    fail_to_meet(store, secret, 1)  # in an earlier start, which does not count
    heard: list[str] = []
    waiting = [threading.Thread(target=refused, args=(store, heard, secret, r)) for r in (0, 2)]
    for thread in waiting:
        thread.start()
    while waiting[0].is_alive() or waiting[1].is_alive():
        fail_to_meet(store, secret, 1)
    assert sorted(heard) == [
        f"rank {rank}: rank 1 has given up the rendezvous: no port" for rank in (0, 2)
    ]


def test_a_stranger_who_writes_in_the_name_of_a_rank_that_gives_up_is_named() -> None:
    store = HashStore()
    heard: list[str] = []
    waiting = threading.Thread(target=refused, args=(store, heard, SECRET, 0))
    waiting.start()
    while waiting.is_alive():
        Refusals(store, None, 1).leave("\x1b[2J all is lost")
    assert heard == [
        "rank 0: 'refused' in the store of the rendezvous was written by a process that does not "
        "know the secret of this run: rank 1 with another key or none, or a stranger (`shoal keys "
        "show` has to say the same on every host)"
    ]


def test_a_rank_with_another_key_is_named() -> None:
    open_store = HashStore()
    open_store.set("secret/1", "given")
    AuthenticatedStore(open_store, new_secret(), 1).set("hello/1", "word")
    with pytest.raises(BadInput, match=r"rank 0: 'hello/1' .*: rank 1 with another key .* keys "):
        authenticated(open_store, SECRET, 0, 2)


@pytest.mark.parametrize("has_left_reason", [True, False])
def test_the_end_of_the_store_is_one_sentence_with_the_reason_that_was_left(
    has_left_reason: bool,
) -> None:
    store = HashStore()
    if has_left_reason:  # by rank 0, which has ended before rank 1 came
        fail_to_meet(store, SECRET, 0)
    with pytest.raises(OtherRankRefused) as raised, heeding_refusals(store, SECRET, 1):
        raise DistNetworkError("Failed to recv, got 0 bytes")
    expected = "rank 0 has given up the rendezvous: no port"
    if not has_left_reason:
        expected = "the store of the rendezvous has ended: the rank that failed first, on another "
        expected += "host, says why"
    assert str(raised.value) == f"rank 1: {expected}"


def test_a_refusal_that_came_before_the_others_is_heard_by_each_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.comm.store.authenticated._UNTIL_HEARD_S", 60.0)
    store, heard = HashStore(), list[str]()
    Refusals(store, None, 1).leave("of an earlier start")
    refusing = threading.Thread(
        target=Refusals(store, None, 1).leave_until_heard, args=("no key", 3)
    )
    refusing.start()
    before = store.get("refused")
    while store.get("refused") == before:  # it stands there when the others come
        threading.Event().wait(0.01)
    waiting = [threading.Thread(target=refused, args=(store, heard, None, r)) for r in (0, 2)]
    for thread in waiting:
        thread.start()
    for thread in [*waiting, refusing]:
        thread.join(50)
        assert not thread.is_alive()
    assert sorted(heard) == [
        f"rank {rank}: rank 1 has given up the rendezvous: no key" for rank in (0, 2)
    ]
