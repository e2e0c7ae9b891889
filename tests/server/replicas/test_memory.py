"""Pushes that replicas read from the memory of their worker."""

from __future__ import annotations

import socket

import pytest
import torch

from shoal.server.client import Client
from shoal.server.consistency import Rule
from shoal.server.model.named_optimizer import classes, step_without_hooks
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.frames import FrameKind, Header, Refused
from shoal.server.protocol.messages import Commit
from shoal.server.replicas.operations import Pushed
from shoal.server.replicas.payloads import IN_MEMORY, read_payload
from tests.server.helpers import MODEL
from tests.server.replicas.world import World, pulled, push_one_hot, world

ASYNC = Rule(1, asynchronous=True)
ELEMENTWISE = ("SGD", "ASGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop")


def test_gradients_do_not_travel_along_the_chain() -> None:
    with world() as made:
        client = made.client(0, ASYNC)
        push_one_hot(client, 0, 0)
        links = [s.replica.runtime.links for s in made.servers.values() if s.replica is not None]
        assert all(link.mapped for peers in links for link in peers.values())
        assert pulled(client)[:2] == [-1.0, 0.0]
        client.close()


def test_a_push_is_overwritten_only_when_all_have_it() -> None:
    """`push_one_hot` overwrites the memory at once: each copy would differ."""
    with world() as made:
        client = made.client(0, ASYNC)
        for step in range(30):
            push_one_hot(client, step % 5, step)
        copies = [made.weights_of(0, replica) for replica in range(3)]
        assert pulled(client)[:5] == [-6.0] * 5
        assert all(torch.equal(copies[0], copy) for copy in copies)
        client.close()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_lent_pushes_survive_the_loss_of_a_replica(place: int) -> None:
    with world() as made:
        client = made.client(0, ASYNC)
        push_one_hot(client, 0, 0)
        made.crash(0, made.members()[place])
        for step in range(1, 4):
            push_one_hot(client, step, step)
        assert pulled(client)[:5] == [-1.0, -1.0, -1.0, -1.0, 0.0]
        copies = [made.weights_of(0, replica) for replica in made.members()]
        assert torch.equal(copies[0], copies[1])
        client.close()


def test_a_replica_that_comes_back_learns_lent_pushes() -> None:
    with world(replicas=2) as made:
        client = made.client(0, ASYNC)
        push_one_hot(client, 0, 0)
        made.crash(0, 0)
        push_one_hot(client, 1, 1)  # it is no member any more
        made.start(0, 0)
        step = 2
        while len(made.members()) < 2:
            push_one_hot(client, step % 5, step)
            step += 1
        push_one_hot(client, step % 5, step)
        copies = [made.weights_of(0, replica) for replica in range(2)]
        assert torch.equal(copies[0], copies[1])
        assert sum(pulled(client)) == -(step + 1.0)
        client.close()


@pytest.mark.parametrize("rule", [Rule(2), Rule(2, quorum=2)], ids=["synchronous", "quorum"])
def test_a_push_that_waits_for_others_is_kept(rule: Rule) -> None:
    """Worker 0 overwrites its memory while its push waits for that of worker 1."""
    with world() as made:
        first, second = joined(made, rule)
        push_one_hot(first, 0, 0)
        first.out.fill_(7.0)
        push_one_hot(second, 1, 0)
        moved = -1.0 if rule.quorum is None else -0.5  # of the fraction that was pushed
        assert pulled(first, version=1)[:3] == [moved, moved, 0.0]
        first.close()
        second.close()


def joined(made: World, rule: Rule) -> tuple[Client, Client]:
    return made.client(0, rule), made.client(1, rule)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_optimizers_leave_gradients_alone(name: str) -> None:
    """Gradients in memory that others read, and that holds another push later."""
    torch.manual_seed(0)
    pushes = torch.randn(4, 6)
    results = []
    for memory in (torch.empty(6), None):
        p = torch.nn.Parameter(torch.ones(6))
        optimizer = classes()[name]([p], lr=0.1, weight_decay=0.01)  # type: ignore[call-arg]
        for pushed in pushes:
            p.grad = pushed.clone() if memory is None else memory.copy_(pushed)
            optimizer.step()
            assert torch.equal(p.grad, pushed)
        results.append(p.detach())
    assert torch.equal(*results)


def test_the_step_without_hooks_is_the_same_step() -> None:
    results = []
    for is_plain in (False, True):
        p = torch.nn.Parameter(torch.ones(6))
        optimizer = torch.optim.AdamW([p], lr=0.1)
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        step = step_without_hooks(optimizer) if is_plain else optimizer.step
        p.grad = torch.arange(6.0)
        step()
        assert len(calls) == (0 if is_plain else 1)
        results.append(p.detach())
    assert torch.equal(*results)


def test_gradients_in_memory_that_is_not_mapped_are_refused() -> None:
    with world() as made:
        client = made.client(0, ASYNC)
        push_one_hot(client, 0, 0)
        host = made.servers[0, 1].host
        member = host.models[MODEL].membership.members[0]
        operation = Pushed(MODEL, 0, member.incarnation, 2, Commit(1, 0, 1.0), (), True)
        header = Header(FrameKind.CHAIN, argument=IN_MEMORY)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(bytes(member.pushes.loss_flags.nbytes))
            with pytest.raises(Refused, match="has 0 bytes, expected"):
                read_payload(host, operation, Connection(theirs), header)
            member.out = None
            with pytest.raises(Refused, match="shares no memory"):
                read_payload(host, operation, Connection(theirs), header)
        client.close()
