"""A store that strangers can write to: what they write is an error, never a value."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import DistNetworkError, HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from shoal.comm.network import LOOPBACK
from shoal.comm.select import GroupSpec, _meet_openly
from shoal.comm.store import client
from shoal.comm.store.authenticated import (
    OtherRankRefused,
    Refusals,
    RendezvousStore,
    heeding_refusals,
)
from shoal.comm.store.client import GuardedStore
from shoal.errors import BadInput, ShoalError
from shoal.runtime.secret import new_secret
from tests.comm.threads import Ranks

SECRET = new_secret()


Meet = Callable[..., list[Store]]


@pytest.fixture
def met() -> Iterator[Meet]:
    """Where each of these ranks finds itself; the first failure is raised."""
    kept: list[Store] = []

    def meet(store: Store, *secrets: bytes | None) -> list[Store]:
        ranks = Ranks[Store]()

        def main(rank: int) -> None:
            try:
                spec = spec_of(rank, len(secrets), secrets[rank])
                ranks.results[rank] = _meet_openly(spec, store, kept)
            except BaseException as error:
                ranks.failures.append(error)

        return ranks.run(len(secrets), main)

    yield meet
    for own in kept:
        assert isinstance(own, GuardedStore)
        own.close()
    while client._services:
        client._services.popitem()[1].close()


def spec_of(rank: int, size: int, secret: bytes | None) -> GroupSpec:
    return GroupSpec(rank, size, "env://", "gloo", "run 1", secret=secret, hostname=LOOPBACK)


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "none"])
def test_ranks_that_have_met_read_what_ranks_have_written(met: Meet, secret: bytes | None) -> None:
    open_store = HashStore()
    for start in ("first", "second"):  # torchrun starts ranks again beside the same store
        one, two = met(open_store, secret, secret)
        one.set("key", start)
        assert two.get("key") == start.encode() and two.add("count", 2) == 2
    assert not open_store.check(["key"])


def test_what_a_stranger_writes_is_refused() -> None:
    open_store = HashStore()
    proven = RendezvousStore(open_store, 0, SECRET, Refusals(open_store, 0))
    proven.set("key", "text")
    assert proven.get("key") == b"text"
    signed = open_store.get("key")
    for forged in (b"", b"text", b"Text" + signed[4:], signed[:-1], bytes(40), b"\xff" * 5):
        open_store.set("key", forged)  # type: ignore[arg-type]
        with pytest.raises(BadInput, match=r"'key' .* does not know the secret of this run"):
            proven.get("key")
    open_store.set("hello/7", signed)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"rank 0: 'hello/7' .*: rank 7 with another key .* keys "):
        proven.get("hello/7")


@pytest.mark.parametrize(
    ("second", "said"),
    [(None, r"rank 1 has no secret.* SHOAL_SECRET"), (new_secret(), "rank 1 with another key")],
    ids=["none", "another"],
)
def test_a_rank_without_the_secret_is_named(met: Meet, second: bytes | None, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        met(HashStore(), SECRET, second)


@pytest.mark.parametrize(
    ("key", "word", "said"),
    [
        ("secret/1", "overwritten", r"what rank 1 wrote .* was overwritten"),
        ("secret/1", "\xff" * 9, "was overwritten"),
        ("hello/1", "\xff" * 9, "does not know the secret"),
    ],
)
def test_a_stranger_who_comes_before_the_ranks_have_met_is_refused(
    key: str, word: str, said: str
) -> None:
    open_store = HashStore()
    open_store.set("secret/1", "given")
    open_store.set(key, word)
    with pytest.raises(ShoalError, match=said):
        _meet_openly(spec_of(0, 2, SECRET), open_store, [])


# ------------------------------------------------------------------ ranks that give up


def fail_to_meet(store: Store, rank: int) -> None:
    with pytest.raises(BadInput, match="no port"), heeding_refusals(store, rank):
        raise BadInput("no port")


def heard_by_others(store: Store, meanwhile: Callable[[], object]) -> list[str]:
    """What ranks 0 and 2 say, which wait for a value that does not come."""
    heard: list[str] = []

    def wait(rank: int) -> None:
        try:
            with heeding_refusals(store, rank) as refusals:
                RendezvousStore(store, rank, None, refusals).get("what does not come")
        except BadInput as error:
            heard.append(str(error))

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        meanwhile()
    return sorted(heard)


def test_ranks_do_not_wait_for_one_that_has_given_up() -> None:
    store = HashStore()
    fail_to_meet(store, 1)  # in an earlier start, which does not count
    heard = heard_by_others(store, lambda: fail_to_meet(store, 1))
    assert heard == [f"rank {r}: rank 1 has given up the rendezvous: no port" for r in (0, 2)]


def test_what_a_rank_that_gives_up_says_is_printable() -> None:
    store = HashStore()
    heard = heard_by_others(store, lambda: Refusals(store, 1).leave("\x1b[2J lost"))
    assert heard[0] == "rank 0: rank 1 has given up the rendezvous:  [2J lost"


@pytest.mark.parametrize("has_left_reason", [True, False])
def test_the_end_of_the_store_is_one_sentence_with_the_reason_that_was_left(
    has_left_reason: bool,
) -> None:
    store = HashStore()
    if has_left_reason:  # by rank 0, which has ended before rank 1 came
        fail_to_meet(store, 0)
    with pytest.raises(OtherRankRefused) as raised, heeding_refusals(store, 1):
        raise DistNetworkError("Failed to recv, got 0 bytes")
    expected = "rank 0 has given up the rendezvous: no port"
    if not has_left_reason:
        expected = "the store of the rendezvous has ended: the rank that failed first"
    assert str(raised.value).startswith(f"rank 1: {expected}")


def test_a_refusal_that_came_before_the_others_is_heard_by_each_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.comm.store.authenticated._UNTIL_HEARD_S", 60.0)
    store = HashStore()
    refusing = threading.Thread(target=Refusals(store, 1).leave_until_heard, args=("no key", 3))
    refusing.start()
    while not store.check(["refused"]):  # it stands there when the others come
        threading.Event().wait(0.01)
    heard = heard_by_others(store, lambda: threading.Event().wait(0.01))
    refusing.join(50)
    assert not refusing.is_alive()
    assert heard == [f"rank {r}: rank 1 has given up the rendezvous: no key" for r in (0, 2)]
