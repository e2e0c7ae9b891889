"""A worker that was lost comes back as another process, and takes its place at the servers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import RunOver, ShoalError
from shoal.runtime import waits
from shoal.server.client.client import Client
from shoal.server.consistency import Rule
from shoal.server.messages import Commit, LogEntry
from shoal.server.model.served_model import ServedModel
from shoal.server.process.server import Server
from tests.server.coordinator.helpers import until
from tests.server.helpers import MODEL, client_of, fill, servers, weights

ASYNC = Rule(2, asynchronous=True)


def push(client: Client, step: int, value: float = 1.0) -> str:
    _, heads = fill(client, value)
    ack = client.commit(Commit(step, 0, 0.5), heads)
    client.settle(ack.position)
    client.wait_settled()
    return ack.verdict


def lose(found: list[Server], client: Client) -> None:
    """As when its process is killed; returns when all servers have noticed."""
    client.close()
    for server in found:
        for model in server.models.values():
            _wait_for_loss(model, client.rank)


def _wait_for_loss(model: ServedModel, worker: int) -> None:
    with model.lock:
        assert model.lock.wait_for(lambda: worker in model.membership.departed, 60)


def back(found: list[Server], rank: int, rule: Rule = ASYNC, generation: int = 1) -> Client:
    return client_of(found, rank, rule, generation=generation)


@pytest.mark.parametrize("count", [1, 3])
def test_it_goes_on_at_the_present_step_and_its_pushes_count_from_1_again(count: int) -> None:
    with servers(count) as found:
        stays, lost = (client_of(found, rank, ASYNC) for rank in range(2))
        before = weights(stays)
        assert [push(lost, 0), push(lost, 1)] == ["admitted"] * 2
        lose(found, lost)
        assert [push(stays, step) for step in range(5)] == ["admitted"] * 5
        again = back(found, 1)
        assert again.comes_back
        entered = again.enter()
        assert (entered.step, entered.clock) == (5, 2)
        assert [push(again, 5), push(again, 6)] == ["admitted"] * 2
        moved = before - weights(again, 9)
        assert set(moved.tolist()) == {9.0, 0.0}, "9 pushes, each counted once; gaps stay 0"
        (leader, *_) = stays.stats()
        assert leader["came_back"] == {"1": 3} and leader["lost"] == []


def test_where_workers_come_back_the_weights_stay_when_all_of_them_are_lost() -> None:
    with servers(2) as found:
        for server in found:
            server.host.takes_back = True
        clients = [client_of(found, rank, ASYNC) for rank in range(2)]
        before = weights(clients[0])
        for client in clients:
            assert push(client, 0) == "admitted"
            lose(found, client)
        again = back(found, 1)
        assert again.comes_back and again.enter().step == 1
        assert push(again, 1) == "admitted"
        assert set((before - weights(again, 3)).tolist()) == {3.0, 0.0}


def test_pushes_of_its_former_process_are_refused_even_if_that_still_runs() -> None:
    with servers(2) as found:
        former, _ = client_of(found, 1, ASYNC), client_of(found, 0, ASYNC)
        push(former, 0)
        again = back(found, 1)  # the servers have not noticed that the former one was lost
        again.enter()
        with pytest.raises(ShoalError, match="worker 1"):
            push(former, 1)
        assert push(again, 1) == "admitted"


def test_a_server_that_has_not_heard_of_its_return_yet_lets_it_wait() -> None:
    with servers(2) as found, ThreadPoolExecutor(1) as pool:
        stays, lost = (client_of(found, rank, ASYNC) for rank in range(2))
        push(lost, 0)
        lose(found, lost)
        push(stays, 0)
        again = back(found, 1)
        goes_on = hold_back(found[1].models[MODEL])
        again.enter()
        _, heads = fill(again, 1.0)
        again.settle(again.commit(Commit(1, 0, 0.5), heads).position)
        settled = pool.submit(again.wait_settled)
        until(lambda: settled.done() or "worker 1" in waiters(), "server 1 waits for its leader")
        goes_on.set()
        settled.result(60)


def waiters() -> list[str]:
    return [wait.who for wait in list(waits._noted.values())]


def hold_back(follower: ServedModel) -> threading.Event:
    """Let the log of the leader be applied there when the event is set."""
    goes_on = threading.Event()
    replay = follower.replay

    def replay_later(entry: LogEntry) -> None:
        goes_on.wait(60)
        replay(entry)

    follower.replay = replay_later  # type: ignore[method-assign]
    return goes_on


def test_a_process_of_the_same_or_an_earlier_start_is_refused() -> None:
    with servers() as found:
        client = back(found, 1, generation=2)
        for generation in (0, 1, 2):
            with pytest.raises(ShoalError, match="worker 1 of 2 is not expected here"):
                back(found, 1, generation=generation)
        assert push(client, 0) == "admitted"


def test_one_that_was_never_there_enters_like_one_that_was_lost() -> None:
    with servers(2) as found:
        for server in found:
            server.host.has_exited = lambda rank: rank == 1
        first = client_of(found, 0, ASYNC)
        first.barrier()  # waits for all that are there
        assert push(first, 0) == "admitted"
        late = back(found, 1)
        assert late.enter().step == 1
        assert push(late, 1) == "admitted"


def test_it_cannot_enter_a_run_that_the_others_have_finished() -> None:
    with servers() as found:
        first, second = (client_of(found, rank, ASYNC) for rank in range(2))
        lose(found, second)
        early = back(found, 1)
        first.leave()
        with pytest.raises(RunOver, match="after the others had finished"):
            early.enter()
        early.close()
        first.close()
        found[0].wait_idle(60)
        with pytest.raises(RunOver):
            back(found, 1, generation=2)


def test_a_barrier_waits_for_the_processes_that_take_part_and_no_others() -> None:
    with servers() as found, ThreadPoolExecutor(3) as pool:
        zero, one, two = (client_of(found, r, Rule(3, asynchronous=True)) for r in range(3))
        push(zero, 0)
        lose(found, zero)
        zero = back(found, 0, Rule(3, asynchronous=True))
        zero.enter()
        for client in (one, two):  # of a meeting that began with the former process of worker 0
            client.meet(5 << 20, (0, 0, 0))
        list(pool.map(Client.barrier, (one, two)))
        assert one.lowest_survivor == two.lowest_survivor == 1
        for client in (zero, one, two):
            client.meet(6 << 20, (1, 0, 0))
        list(pool.map(Client.barrier, (zero, one, two)))
        assert zero.lowest_survivor == one.lowest_survivor == 0
