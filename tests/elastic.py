"""Workers of an elastic run as threads: they die in the middle of collectives, and come back."""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.comm.call import Call
from shoal.comm.executor import Executor
from shoal.comm.executors.solo import solo_group
from shoal.comm.members.board import Board, FileBoard, GroupMember
from shoal.comm.members.elastic_group import ElasticGroup
from shoal.comm.members.membership import GroupMembership
from shoal.comm.members.network_board import NetworkBoard, ServedBoard
from shoal.comm.network import HostNetwork
from shoal.comm.store.service import StoreService
from shoal.comm.transport.transport import Work
from shoal.errors import RunOver
from shoal.runtime.config import RunConfig
from shoal.runtime.run_dir import RunDir
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.train.step.run_services import RunServices
from tests.models import mlp

BATCH = 24
PER_EPOCH = 5
EPOCHS = 3
PATIENCE_S = 90.0
SECRET = b"k" * 32
_drawing = threading.Lock()  # threads share the random numbers of torch
Train = Callable[["Workers", Job], Any]


class Killed(BaseException):
    """This life of a worker is over."""


def numbered_samples(count: int) -> TensorDataset:
    """Samples that hold their number, so that it can be seen which were trained on."""
    rows = torch.randn(count, 6, generator=torch.Generator().manual_seed(3))
    rows[:, 0] = torch.arange(count) / count
    return TensorDataset(rows, torch.arange(count) % 3)


numbered = partial(numbered_samples, BATCH * PER_EPOCH)


class Mortal(Executor):
    """Passes calls on; in the call that `is_last` chooses its worker dies, before or after it."""

    def __init__(self, executor: Executor, is_last: Callable[[], str | None]):
        self._executor = executor
        self._is_last = is_last
        self.rank = executor.rank
        self.size = executor.size
        self.takes_cores = executor.takes_cores

    def submit(self, call: Call) -> Work:
        return self._live_through(lambda: self._executor.submit(call))

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        return self._live_through(lambda: self._executor.send(data, dst, tag))

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        return self._live_through(lambda: self._executor.recv(into, src, tag))

    def _live_through(self, act: Callable[[], Work]) -> Work:
        when = self._is_last()
        if when == "before":
            raise Killed
        work = act()
        if when == "after":
            raise Killed
        return work

    def split(self, ranks: Sequence[int]) -> Executor | None:
        child = self._executor.split(ranks)
        return None if child is None else Mortal(child, self._is_last)

    def close(self) -> None:
        self._executor.close()


@dataclass
class Workers:
    """A run of `size` workers; each one calls `live` once for each of its lives."""

    folder: Path
    size: int
    train: Train
    strategy: str = "ddp(elastic=True)"
    dies: dict[GroupMember, tuple[int, str]] = field(default_factory=dict)  # in which call
    dies_in: dict[GroupMember, tuple[int, int, str]] = field(default_factory=dict)
    """In which generation, and in which call of it."""
    used: dict[int, set[int]] = field(default_factory=dict)  # step -> workers
    results: dict[int, Any] = field(default_factory=dict)  # by worker
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.folder)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """What the launcher of the run does meanwhile."""
        yield

    def run(self, *lives: Callable[[], Any]) -> None:
        """All workers, and further lives of them, each as a thread that may be left behind."""
        errors: list[BaseException] = []

        def follow(life: Callable[[], Any]) -> None:
            try:
                life()
            except BaseException as error:
                errors.append(error)

        acts = [*(partial(self.live, rank) for rank in range(self.size)), *lives]
        threads = [threading.Thread(target=follow, args=[act], daemon=True) for act in acts]
        with self.serving():
            for thread in threads:
                thread.start()
            deadline_s = time.monotonic() + PATIENCE_S
            for thread in threads:
                thread.join(max(0.0, deadline_s - time.monotonic()))
            stacks = [sys._current_frames().get(t.ident or 0) for t in threads if t.is_alive()]
        if errors:
            raise errors[0]
        waiting = ["".join(traceback.format_stack(stack)[-6:]) for stack in stacks if stack]
        assert not waiting, f"{len(waiting)} workers have not ended:\n" + "\n".join(waiting)

    def live(self, rank: int, incarnation: int = 0) -> None:
        """To the end, or to the call in which it dies."""
        member = GroupMember(rank, incarnation)
        if incarnation:
            self.note_start(member)
        try:
            with self.ending(member), closing(self._group(member)) as group:
                result = self.train(self, self._job(group))
                self.results[rank] = result
        except (Killed, RunOver):
            pass

    @contextmanager
    def ending(self, member: GroupMember) -> Iterator[None]:
        """The exit of this process is noted when it has closed what it had."""
        try:
            yield
        finally:
            self.note_exit(member)

    def note_start(self, member: GroupMember) -> None:
        self.run_dir.note_start(*member)

    def note_exit(self, member: GroupMember) -> None:
        self.run_dir.note_exit(member.worker, -9)

    def die(self) -> NoReturn:
        """End the life of the worker that calls it."""
        raise Killed

    def board(self, member: GroupMember) -> Board:
        return FileBoard(self.run_dir.members(1), self.run_dir)

    def hosts(self, member: GroupMember) -> HostNetwork | None:
        return None

    def _group(self, member: GroupMember) -> ElasticGroup:
        membership = GroupMembership(self.board(member), member, self.size, 60.0)
        group = ElasticGroup(membership, 60.0, self.hosts(member))
        calls = iter(range(1_000_000))
        dies_in, when = self.dies.get(member, (-1, ""))

        def is_last() -> str | None:
            return when if next(calls) == dies_in else None

        if dies_in >= 0:
            group.wrap = lambda executor: Mortal(executor, is_last)
        if member in self.dies_in:
            group.wrap = partial(self._mortal_in, membership, *self.dies_in[member])
        return group

    def _mortal_in(
        self,
        membership: GroupMembership,
        generation: int,
        dies_in: int,
        when: str,
        executor: Executor,
    ) -> Executor:
        if membership.generation.number != generation:
            return executor
        calls = iter(range(1_000_000))
        return Mortal(executor, lambda: when if next(calls) == dies_in else None)

    def _job(self, group: ElasticGroup) -> Job:
        generation = group.membership.me.incarnation
        config = replace(RunConfig.from_environment(), incarnation=generation, run_dir=self.run_dir)
        services = RunServices(config=config)
        cpu = torch.device("cpu")
        return Job(parse(self.strategy), group, device=cpu, seed=3, services=services)


def random_deaths(
    choose: random.Random, count: int, calls: int
) -> dict[GroupMember, tuple[int, str]]:
    """So many of four workers die in one of the first calls, before or after it."""
    return {
        GroupMember(rank, 0): (choose.randrange(calls), choose.choice(("before", "after")))
        for rank in choose.sample(range(4), count)
    }


@dataclass
class HostWorkers(Workers):
    """They count as processes of several hosts: `per_host` neighbours share one.

    The board is served as a launcher does it.
    """

    per_host: int = 1
    moved: dict[GroupMember, str] = field(default_factory=dict)  # those that came back elsewhere

    @contextmanager
    def serving(self) -> Iterator[None]:
        service = StoreService("127.0.0.1", 0, SECRET)
        self._port = service.port
        self._served = ServedBoard(service)
        try:
            yield
        finally:
            service.close()

    def note_start(self, member: GroupMember) -> None:
        self._served.note_start(member)

    def note_exit(self, member: GroupMember) -> None:
        self._served.note_exit(member)

    def board(self, member: GroupMember) -> Board:
        return NetworkBoard(("127.0.0.1", self._port), SECRET, member, 1)

    def hosts(self, member: GroupMember) -> HostNetwork:
        name = self.moved.get(member, f"host {member.worker // self.per_host}")
        return HostNetwork(RunConfig(host_id=f"{self.folder} {name}"))


def alone(train: Train, folder: Path) -> Any:
    """What one worker that is never disturbed returns."""
    job = Job(parse("single"), solo_group(), device=torch.device("cpu"), seed=3)
    return train(Workers(folder, 1, train), job)


def exact_step(job: Job, make: Callable[[], nn.Module] = mlp) -> Any:
    adam = partial(torch.optim.Adam, lr=0.01)
    return job.step(built(make), F.cross_entropy, optimizer=adam, exact=True)


def built(make: Callable[[], nn.Module] = mlp) -> nn.Module:
    """A model that the threads make one after the other."""
    with _drawing:
        return make()


def wait_for_request(job: Job) -> None:
    """Until a worker asks to join."""
    assert job._elastic is not None
    while not job._elastic.group.membership.has_newcomers():
        threading.Event().wait(0.001)


class Return:
    """Worker 1 comes back when the others are at step 6, where they wait for its request.

    Worker 0 lets it come: it admits newcomers, and must not do so before it waits for one itself.
    """

    def __init__(self) -> None:
        self._at_six = threading.Event()

    @staticmethod
    def is_late(job: Job) -> bool:
        return job._services.config.incarnation > 0

    def wait(self, job: Job) -> None:
        if job.steps == 6 and not self.is_late(job):
            if job.rank == 0:
                self._at_six.set()
            wait_for_request(job)

    def come_back(self, workers: Workers) -> None:
        assert self._at_six.wait(60)
        workers.live(1, 1)
