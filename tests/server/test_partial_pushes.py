"""A push whose gradients have not all come, as a client that means harm sends it, is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import Tensor

from shoal.server.client.client import Client
from shoal.server.client.route import Request
from shoal.server.consistency import Rule
from shoal.server.messages import Commit, Stats
from shoal.server.protocol import ErrorReply, FrameKind, decode, encode
from shoal.server.protocol.connection import Closed
from shoal.server.protocol.endpoint import PLAIN
from shoal.server.shared_memory import bytes_of
from tests.server.coordinator.helpers import until
from tests.server.helpers import MODEL, client_of, fill, servers, weights
from tests.server.replicas.world import world

ALONE = Rule(1, asynchronous=True)
Copies = Callable[[], list[Tensor]]


@contextmanager
def one_server() -> Iterator[tuple[Client, Copies]]:
    with servers(tcp=True) as found:
        client = client_of(found, 0, ALONE)
        yield client, lambda: [found[0].models[MODEL].state.shard.data.clone()]


@contextmanager
def a_chain_of_three() -> Iterator[tuple[Client, Copies]]:
    with world(3, tls=PLAIN) as made:
        client = made.client(0, ALONE)
        yield client, lambda: [made.weights_of(0, copy).clone() for copy in made.members()]


# which halves of the gradients are sent, and how many quarters of their bytes COMMIT claims
ATTACKS: dict[str, tuple[list[int], int]] = {
    "no gradients": ([], 0),
    "no gradients, and it claims all": ([], 4),
    "half of them": ([1], 2),
    "half of them, and it claims all": ([0], 4),
    "one half twice": ([0, 0], 4),
    "all of them, and it claims less": ([1, 0], 3),
    "all of them, and it claims more": ([1, 0], 5),
}


def attack(client: Client, halves: list[int], quarters: int) -> ErrorReply:
    """The answer to such a push, after one that was whole."""
    route, connection = client.links[0].route, client.links[0].connection("push")
    spec = client.specs[0]
    gradients = torch.full((spec.stop - spec.start,), 8.0)
    commit = Commit(1, 1, 1.0, pushed_bytes=quarters * gradients.nbytes // 4)
    loss_flags = bytes_of(torch.ones(1, 1 + spec.parameters))
    with suppress(Closed):  # by the server, which has refused what came before
        for half in halves:
            part = gradients.chunk(2)[half]
            start = 4 * half * len(gradients.chunk(2)[0])
            bucket = Request(FrameKind.BUCKET, b"", (bytes_of(part),), sequence=2, argument=start)
            route.send(connection, bucket)
        route.send(connection, Request(FrameKind.COMMIT, encode(commit), (loss_flags,), sequence=2))
    header, meta = connection.receive(1 << 16)
    assert header.kind is FrameKind.ERROR
    return decode(meta, ErrorReply)


@pytest.mark.parametrize("served", [one_server, a_chain_of_three])
@pytest.mark.parametrize("name", ATTACKS)
def test_a_push_that_is_not_whole_is_refused_and_changes_no_copy(
    served: Callable[[], Iterator[tuple[Client, Copies]]], name: str
) -> None:
    with served() as (client, copies):  # type: ignore[attr-defined]
        assert client.commit(*fill(client, 1.0)).verdict == "admitted"
        before = copies()
        assert any(bool(copy.any()) for copy in before)
        refusal = attack(client, *ATTACKS[name])
        assert refusal.lost is None and refusal.moved is None
        assert any(word in refusal.reason for word in ("lacks", "twice", "have arrived"))
        for copy, same in zip(copies(), before, strict=True):
            assert torch.equal(copy, same)


@pytest.mark.parametrize("served", [one_server, a_chain_of_three])
def test_what_was_sent_before_a_connection_broke_does_not_count_twice(
    served: Callable[[], Iterator[tuple[Client, Copies]]],
) -> None:
    with served() as (client, copies):  # type: ignore[attr-defined]
        for step in range(2):
            _, loss_flags = fill(client, 1.0)
            client.links[0].connection("push").abort()
            assert client.commit(Commit(step, step, 1.0), loss_flags).verdict == "admitted"
        assert weights(client, 2).unique().tolist() == [-2.0, 0.0]
        assert len({tuple(copy.tolist()) for copy in copies()}) == 1


def test_gradients_that_were_sent_to_a_lost_head_are_sent_to_the_next_one() -> None:
    """The channel of pushes moves before its next request, and nothing breaks on it."""
    with world(3, tls=PLAIN) as made:
        client = made.client(0, ALONE)
        client.commit(*fill(client, 1.0))
        link = client.links[0]
        _, loss_flags = fill(client, 2.0)
        until(lambda: len(link._unacknowledged["push"]) == 1, "the gradients are sent")
        made.crash(0, made.head())
        client.request(link, FrameKind.STATS, Stats())  # it looks for the head
        assert client.commit(Commit(1, 1, 1.0), loss_flags).verdict == "admitted"
        assert weights(client, 2).unique().tolist() == [-3.0, 0.0]


def test_what_lies_between_parameters_need_not_be_sent() -> None:
    with one_server() as (client, _):
        spec = client.specs[0]
        client.out[0].fill_(1.0)
        for held in spec.slices:
            client.push(slice(held.start, held.start + math.prod(held.shape)))
        sent = client.links[0].pushed_bytes
        loss_flags = torch.ones(1, 1 + spec.parameters)
        assert client.commit(Commit(0, 0, 1.0), loss_flags).verdict == "admitted"
        assert 0 < sent < 4 * (spec.stop - spec.start)
