"""Strong consistency: what real clients see is linearizable, whatever is lost between them."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.server.consistency import Rule
from tests.server.replicas.histories import History, HistoryWorker
from tests.server.replicas.hosts import HostWorld, hosts_world
from tests.server.replicas.processes import COORDINATOR, processes
from tests.server.replicas.world import world


def test_what_clients_see_around_the_loss_of_a_head_is_linearizable() -> None:
    history = History()
    rule = Rule(2, asynchronous=True)
    with world() as made:
        workers = [
            HistoryWorker(history, lambda rank=rank: made.client(rank, rule), pushes=8)
            for rank in range(2)
        ]
        workers[0].wait(4)
        made.crash(0, made.head())
        for worker in workers:
            worker.join()
    assert len(history.added) == 16
    assert history.violation() is None
    assert with_a_stale_read(history).violation() is not None


def with_a_stale_read(history: History) -> History:
    """The last read gets what one in the middle has seen."""
    last = max(history.observed, key=lambda read: read.invoked_s)
    stale = sorted(read.value for read in history.observed)[len(history.observed) // 2]
    assert stale != last.value
    history.observed[history.observed.index(last)] = replace(last, value=stale)
    return history


@pytest.mark.whole
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(3))
def test_processes_that_are_killed_and_stopped_show_linearizable_histories(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    history = History()
    with processes(tmp_path) as made:
        workers = [
            HistoryWorker(history, lambda rank=rank: made.client(rank, workers=3), pushes=70)
            for rank in range(3)
        ]
        for done in range(10, 60, 10):
            workers[0].wait(done)
            victim: Any = chance.choice([*made.members(), COORDINATOR])
            if chance.random() < 0.5 and victim != COORDINATOR:
                made.signal(victim, signal.SIGSTOP)
                workers[0].wait(done + 5)
                made.signal(victim, signal.SIGCONT)
            else:
                made.signal(victim, signal.SIGKILL)
                made.wait_dead(victim)
                made.start(victim)
        for worker in workers:
            worker.join()
    assert history.violation() is None
    assert len(history.observed) > 400


def worker_on_its_host(
    made: HostWorld, history: History, rank: int, workers: int, pushes: int, reads: int = 2
) -> HistoryWorker:
    rule = Rule(workers, asynchronous=True)
    host = made.net.hosts[made.of_worker]
    return HistoryWorker(history, lambda: made.client(rank, rule), pushes, reads, host.enter)


def reads_at_a_tail_that_is_cut_off(spoil: Callable[[HostWorld], None]) -> History:
    """A client that only reads is served by the tail, which reaches no one but it."""
    history = History()
    with hosts_world() as made:
        spoil(made)
        host = made.net.hosts[made.of_worker]
        is_over = threading.Event()
        is_ready = threading.Event()
        rule = Rule(3, asynchronous=True)

        def read() -> None:
            host.enter()
            client = made.client(2, rule)
            while not is_over.is_set():
                history.pull(client)
                is_ready.set()
            client.close()

        threads = [threading.Thread(target=read)]
        threads.append(threading.Thread(target=lambda: host.call(lambda: idle(made, rule))))
        for thread in threads:
            thread.start()
        writer = worker_on_its_host(made, history, 0, 3, pushes=30, reads=0)
        writer.wait(5)
        is_ready.wait(30)
        epoch = made.config.epoch
        made.net.isolate(2, but=(made.of_worker,))
        made.wait(lambda: made.config.epoch > epoch)
        writer.join()
        count = len(history.observed)
        made.wait(lambda: len(history.observed) > count + 2)
        is_over.set()
        made.net.heal()
        for thread in threads:
            thread.join(60)
    return history


def idle(made: HostWorld, rule: Rule) -> None:
    made.client(1, rule).close()


@pytest.mark.whole
def test_a_tail_that_is_cut_off_shows_no_old_value() -> None:
    assert reads_at_a_tail_that_is_cut_off(lambda made: None).violation() is None


@pytest.mark.whole
def test_a_replica_that_answers_without_a_lease_is_found_out() -> None:
    def spoil(made: HostWorld) -> None:
        replica = made.servers[0, 2].chain
        assert replica is not None
        replica.runtime.confirm = lambda node: None  # type: ignore[method-assign]

    wrong = reads_at_a_tail_that_is_cut_off(spoil).violation()
    assert wrong is not None
    assert "lacks" in wrong
