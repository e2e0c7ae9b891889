"""A store that strangers can write to: what they write is an error, never a value."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
    own_generation,
)
from shoal.comm.store.client import GuardedStore
from shoal.comm.transport.shm.segment import is_built
from shoal.errors import BadInput, ShoalError
from shoal.runtime.config import RunConfig
from shoal.runtime.secret import new_secret
from tests.comm.test_frameworks import TORCHRUN, run
from tests.comm.threads import on_ranks
from tests.comm.torch_ranks import forked_ranks

SECRET = new_secret()
native = pytest.mark.skipif(not is_built(), reason="built without a compiler")


Meet = Callable[..., list[Store]]


@pytest.fixture
def met() -> Iterator[Meet]:
    """Where each of these ranks finds itself; the first failure is raised."""
    kept: list[Store] = []

    def meet(store: Store, *secrets: bytes | None) -> list[Store]:
        def main(rank: int) -> Store:
            return _meet_openly(spec_of(rank, len(secrets), secrets[rank]), store, kept)

        return on_ranks(len(secrets), main)

    yield meet
    for own in kept:
        assert isinstance(own, GuardedStore)
        own.close()
    while client._services:
        client._services.popitem()[1].close()


def spec_of(rank: int, size: int, secret: bytes | None) -> GroupSpec:
    config = RunConfig(hostname=LOOPBACK)
    return GroupSpec(rank, size, "env://", "gloo", "run 1", secret=secret, config=config)


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


# ------------------------------------------------------------------ ranks that are started again


def start(store: Any, size: int) -> list[Any]:
    """The parts of the store that ranks which start together get."""
    with ThreadPoolExecutor(size) as pool:
        parts = pool.map(lambda rank: own_generation(store, rank, size, 20.0), range(size))
        return list(parts)


def test_ranks_of_one_start_share_their_keys_and_no_others_do_whatever_their_number() -> None:
    store = dist.HashStore()
    for size in (2, 2, 4, 3, 1):
        parts = start(store, size)
        assert not parts[-1].check(["key"])
        parts[0].set("key", str(size))
        assert [int(part.get("key")) for part in parts] == [size] * size


@pytest.mark.parametrize("left", [["hello/1"], ["hello/1", "hello/2"]])
def test_words_of_ranks_that_ended_before_the_others_came_are_not_taken(left: list[str]) -> None:
    store = dist.HashStore()
    for key in left:
        store.set(key, "word of a rank that is gone")
    parts = start(store, 3)
    parts[0].set("key", "0")
    assert [part.get("key") for part in parts] == [b"0"] * 3


def test_rank_0_names_the_ranks_that_do_not_come() -> None:
    store = dist.HashStore()
    for peer in (1, 2):
        store.set(f"hello/{peer}", "word of a rank that is gone")
    with pytest.raises(ShoalError, match="rank 0 waits for rank 1, 2"):
        own_generation(store, 0, 3, timeout_s=0.0)


@native
def test_killed_ranks_start_again_with_shared_memory_in_the_same_store(tmp_path: Path) -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def main(rank: int, is_killed: bool) -> Any:
        store = dist.TCPStore("localhost", server.port)
        dist.init_process_group("shoal", store=store, rank=rank, world_size=2)
        data = torch.ones(3)
        dist.all_reduce(data)
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return type(dist.group.WORLD.executor).__name__, data.tolist()  # type: ignore[union-attr]

    assert forked_ranks(lambda rank: main(rank, True), 2) == [None, None]
    assert forked_ranks(lambda rank: main(rank, False), 2) == [("SharedMemory", [2.0] * 3)] * 2


PROGRAM = """
import signal, sys
dist.init_process_group("shoal")
data = torch.ones(3)
dist.all_reduce(data)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if first and dist.get_rank() == 1:
    {failure}
dist.all_reduce(data)
print(type(dist.group.WORLD.executor).__name__, data.tolist(), flush=True)
dist.destroy_process_group()
"""


@native
@pytest.mark.whole
@pytest.mark.parametrize(
    "failure", ["raise OSError", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_torchrun_starts_failed_ranks_again(tmp_path: Path, failure: str) -> None:
    words = [*TORCHRUN[:-1], "--max-restarts", "1", TORCHRUN[-1]]
    done = run(tmp_path, PROGRAM.format(failure=failure), *words)
    for word in ("SharedMemory", "[4.0, 4.0, 4.0]"):  # lines of two ranks may be mixed
        assert done.stdout.count(word) == 2, done.stdout
    assert "over Gloo" not in done.stderr
