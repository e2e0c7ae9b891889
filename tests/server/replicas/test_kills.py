"""kill -9 of every kind of process at every named point of a push and of a change of the chain.

A process is killed when it comes to the point itself; a worker, the coordinator and other servers
are killed while a server is stopped there. Pushes are one-hot integers: the final weights prove
that each acknowledged one counts once.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from shoal.runtime.checkpoint_folders import shard_name, version_of
from shoal.runtime.config import ServerCheckpointConfig
from shoal.server.client.chain_route import ChainRoute
from shoal.server.client.client import Client
from shoal.server.client.route import MovedAway
from shoal.server.messages import Pull
from shoal.server.process.shard_file import read_shard
from shoal.server.protocol import FrameKind, encode
from tests.server.coordinator.helpers import until
from tests.server.helpers import MODEL
from tests.server.replicas.processes import COORDINATOR, START_S, WORKER, Name, Processes
from tests.server.replicas.world import pulled, push_one_hot

HEAD, MIDDLE, TAIL = 0, 1, 2
PUSH = ("received", "validated", "deduplicated", "logged", "replicated", "applied", "acknowledged")
PUSHES = 14
LEASE_S = 2.0  # a replica that waits for a core must not be taken for lost
EXTRA = 14  # the element that the other worker pushes


@dataclass(frozen=True)
class Case:
    """At `point` of `place` (the second time) `victim` is killed."""

    place: Name
    point: str
    victim: Name
    lost: tuple[int, ...] = ()  # killed before, so that there is something to change
    returns: int | None = None  # of the lost: it is started again, and is taught by the tail

    def __str__(self) -> str:
        provoked = "-returns" if self.returns is not None else "-lost" * bool(self.lost)
        return f"{self.victim}-at-{self.place}-{self.point}{provoked}"

    @property
    def armed(self) -> str:
        action = "kill" if self.victim == self.place else "stop"
        return f"{self.point}:{action}" + ("@3" if self.point.startswith("push.") else "+")


def _push_cases() -> list[Case]:
    points = [f"push.{point}" for point in PUSH]
    itself = [Case(p, point, p) for p in (HEAD, MIDDLE, TAIL) for point in points]
    others = [
        Case(place, point, victim)
        for victim in (WORKER, COORDINATOR)
        for place in (HEAD, TAIL)
        for point in points
    ]
    return itself + others


def _election_cases() -> list[Case]:
    electors = {HEAD: (TAIL,), MIDDLE: (HEAD,), TAIL: (HEAD, MIDDLE)}
    return [
        Case(elector, f"election.{when}", victim, lost)
        for elector, lost in electors.items()
        for when in ("before", "after")
        for victim in (elector, WORKER, COORDINATOR)
        if victim != TAIL  # the last copy
    ]


def _learner_cases() -> list[Case]:
    """The middle one is lost and comes back behind the tail."""
    at_tail = [(TAIL, "snapshot.begin"), (TAIL, "splice")]
    at_learner = [(MIDDLE, f"snapshot.{point}") for point in ("temporary", "fsync", "rename")]
    return [
        Case(place, point, victim, (MIDDLE,), MIDDLE)
        for place, point in at_tail + at_learner
        for victim in (HEAD, MIDDLE, TAIL, WORKER, COORDINATOR)
    ]


def _coordinator_cases() -> list[Case]:
    """It is killed while it writes down that a member is lost, or that one is added."""
    points = [f"store.{point}" for point in ("begin", "partial", "temporary", "fsync", "rename")]
    return [
        Case(COORDINATOR, point, COORDINATOR, (MIDDLE,), returns)
        for point in points
        for returns in (None, MIDDLE)
    ]


CASES = [*_push_cases(), *_election_cases(), *_learner_cases(), *_coordinator_cases()]
FEW = [Case(TAIL, "splice", TAIL, (MIDDLE,), MIDDLE)]


@pytest.mark.parametrize(
    "case",
    [case if case in FEW else pytest.param(case, marks=pytest.mark.whole) for case in CASES],
    ids=str,
)
def test_an_acknowledged_push_counts_once_whatever_is_killed(tmp_path: Path, case: Case) -> None:
    Run(tmp_path, case).check()


@pytest.mark.whole
@pytest.mark.parametrize("point", ["election.before", "election.after"])
def test_a_replica_that_is_killed_at_the_first_election_takes_its_place_later(
    tmp_path: Path, point: str
) -> None:
    with closing(Processes(tmp_path, 3, {HEAD: f"{point}:kill"}, LEASE_S)) as made:
        assert made.wait_dead(HEAD) == -signal.SIGKILL
        made.start(HEAD)
        client = made.client()
        for element in range(4):
            push_one_hot(client, element, element)
        until(lambda: len(made.members()) == 3, "all are members")
        assert pulled(client)[:5] == [-1.0] * 4 + [0.0]
        assert len(set(copies_of(client, 3))) == 1
        client.close()


class Run:
    """One worker pushes, another one stays to look; something is killed."""

    def __init__(self, folder: Path, case: Case):
        self.case = case
        self.folder = folder
        self.pushed = 0
        self.unknown: set[int] = set()  # pushes of a killed worker that were not acknowledged

    def check(self) -> None:
        case = self.case
        is_later = case.place in (case.returns, COORDINATOR)
        first = {} if is_later else {case.place: case.armed}
        with closing(Processes(self.folder, 3, first, LEASE_S)) as made:
            self.made = made
            stays = made.client(0, workers=2)
            try:
                made.start_worker(1, 0, workers=2)
                self._provoke()
                self._kill()
                while self.pushed < PUSHES:
                    self._push()
                push_one_hot(stays, EXTRA, 0)
                self._restart_servers()
                self._compare(stays)
            finally:
                stays.close()

    def _provoke(self) -> None:
        """Let the place come to its point."""
        case, made = self.case, self.made
        if not case.lost:
            while self.pushed < 2:  # the third one meets it
                self._push()
            made.push(self.pushed)
            return
        for _ in range(4):
            self._push()
        if case.place == COORDINATOR and case.returns is None:
            self._arm_coordinator()
        *before, last = case.lost
        for replica in before:
            made.kill(replica)
        (made.run_dir.path / "armed").touch()
        made.kill(last)
        if case.returns is not None:
            until(lambda: 0 < len(made.members()) < made.replicas, "it is removed")
            if case.place == COORDINATOR:
                self._arm_coordinator()
            made.start(case.returns, case.armed if case.returns == case.place else None)
        made.push(self.pushed)

    def _arm_coordinator(self) -> None:
        """What it writes from now on is about the change."""
        self.made.kill(COORDINATOR)
        self.made.start(COORDINATOR, self.case.armed)
        until(lambda: bool(self.made.members()), "it answers")

    def _kill(self) -> None:
        """The worker has an unanswered push meanwhile."""
        case, made = self.case, self.made
        if case.victim == case.place:
            assert made.wait_dead(case.place) == -signal.SIGKILL
        else:
            made.wait_stopped(case.place)
            made.kill(case.victim)
            made.signal(case.place, signal.SIGCONT)
        if case.victim == COORDINATOR:
            made.start(COORDINATOR)
        self._take_answer()
        if case.victim == WORKER:
            made.start_worker(1, 1, workers=2)

    def _push(self) -> None:
        self.made.push(self.pushed)
        self._take_answer()

    def _take_answer(self) -> None:
        answer = self.made.answered()
        if answer is None:
            assert self.case.victim == WORKER, "the worker has failed"
            self.unknown.add(self.pushed)
        else:
            assert answer == self.pushed
        self.pushed += 1

    def _restart_servers(self) -> None:
        """All that were killed come back, and the chain is whole again."""
        made = self.made
        for replica in range(made.replicas):
            if made.processes[replica].poll() is not None:
                made.start(replica)
        until(lambda: len(made.members()) == made.replicas, f"{made.members()} are all members")

    def _compare(self, stays: Client) -> None:
        weights = pulled(stays)
        assert weights[EXTRA] == -1.0
        for element in range(PUSHES):
            allowed = (-1.0, 0.0) if element in self.unknown else (-1.0,)
            assert weights[element] in allowed, f"push {element} of {weights}"
        assert set(weights[EXTRA + 1 :]) == {0.0}
        assert len(set(copies_of(stays, self.made.replicas))) == 1, "bit for bit"


def copies_of(client: Client, replicas: int) -> list[bytes]:
    """The weights of the only shard, as each member holds them."""
    route = client.links[0].route
    assert isinstance(route, ChainRoute)

    found: list[bytes] = []

    def has_all() -> bool:
        found.clear()
        client.stats()  # the head says which epoch it is
        with suppress(MovedAway):  # there is a later one
            found.extend(_weights_at(route, copy) for copy in route.view.members)
        return len(found) == replicas

    until(has_all, "the worker knows all members")
    return found


def _weights_at(route: ChainRoute, copy: int) -> bytes:
    header = route.caller.header._replace(kind=FrameKind.PULL, epoch=route.view.epoch)
    with closing(route.connect_copy(copy, "pull", START_S)) as connection:
        connection.send(header, encode(Pull(None, 0)))
        answer, _ = route.receive(connection, FrameKind.PULL)
        payload = bytearray(answer.payload_bytes)
        connection.read_into(memoryview(payload))
    assert payload
    return bytes(payload)


LEASE_S = 2.0


def save_until(client: Client, done: int, is_over: Callable[[], bool]) -> int:
    """Pushes that ask for a save, which is left out while the one before is being written."""
    while not is_over():
        push_one_hot(client, done, done, save=done + 1)
        done += 1
        with suppress(AssertionError):
            until(is_over, "a save", 1.0)
    return done


@pytest.mark.whole
@pytest.mark.parametrize("point", ["begin", "temporary", "fsync", "rename"])
def test_the_checkpoint_before_stays_and_the_next_head_writes_the_next_one(
    tmp_path: Path, point: str
) -> None:
    folder = tmp_path / "saved"
    armed = {0: f"snapshot.{point}:kill@2"}
    checkpoint = ServerCheckpointConfig(folder)

    def file(number: int) -> Path:
        return version_of(folder, number, MODEL).path / shard_name(0, 1)

    def exists(number: int) -> bool:
        return file(number).exists()

    with closing(Processes(tmp_path, 3, armed, LEASE_S, checkpoint)) as made:
        client = made.client()
        push_one_hot(client, 0, 0, save=1)
        until(file(1).exists, "the first checkpoint")
        with ThreadPoolExecutor(1) as pool:  # tells the coordinator of the loss
            ended = pool.submit(made.wait_dead, 0)
            done = save_until(client, 1, lambda: ended.done())
            assert ended.result() == -signal.SIGKILL
        written = [number for number in range(1, done + 1) if file(number).exists()]
        for number in written:
            assert torch.count_nonzero(read_shard(file(number)).weights) == number
        assert (len(written) > 1) == (point == "rename")
        push_one_hot(client, done, done)
        first = done + 2  # what the next head writes; it removes what was never complete
        done = save_until(client, done + 1, lambda: any(map(exists, range(first, first + 9))))
        assert pulled(client)[: done + 1] == [-1.0] * done + [0.0]
        client.close()
    (last,) = filter(exists, range(first, first + 9))
    assert torch.count_nonzero(read_shard(file(last)).weights) == last
