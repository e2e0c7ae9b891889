"""What every worker trains, and what is written down on the way."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.errors import CheckpointError
from shoal.rehearse.sockets import VirtualProcess
from shoal.rehearse.virtual_time import VirtualTime
from shoal.server import messages
from shoal.server.chain import Entry
from shoal.server.chain.node import ChainNode
from shoal.server.client.chain_route import ChainRoute
from shoal.server.client.client import Client
from shoal.server.client.route import Request
from shoal.server.member.core import ChainCore
from shoal.server.member.operations import Operation, Pushed
from shoal.server.model.state import ModelState
from shoal.server.protocol import FrameKind
from shoal.train.job import Job
from tests.models import mlp, samples
from tests.rehearse.faults.disturbance import full_disk
from tests.rehearse.faults.scenario import FullDisk, Scenario

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
}


class Counts(nn.Module):
    """Each weight counts how often the gradient of its sample was applied.

    The loss is minus the mean of the outputs, so gradients do not depend on the weights. With SGD
    and the global batch size as learning rate a sample of a full batch adds 1 to its weight.
    """

    def __init__(self, samples: int):
        super().__init__()
        ends = [0, samples // 3, samples // 3 + 1, samples]
        self.columns = [slice(a, b) for a, b in itertools.pairwise(ends)]
        self.parts = nn.ModuleList(
            nn.Linear(each.stop - each.start, 1, bias=False) for each in self.columns
        )
        for part in self.parts:
            nn.init.zeros_(part.weight)  # type: ignore[arg-type]

    def forward(self, rows: Tensor) -> Tensor:
        """rows: [samples, samples of the dataset], one 1 in each."""
        parts = zip(self.parts, self.columns, strict=True)
        return sum((part(rows[:, columns]) for part, columns in parts), torch.zeros(()))


def counting_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return -outputs.mean()


class Trained(NamedTuple):
    """What one worker had of the global batch of a step: indices of samples."""

    samples: tuple[int, ...]
    total: int


PushKey = tuple[int, int, int, int]  # model, worker, its incarnation, sequence


class Acknowledged(NamedTuple):
    worker: int
    step: int
    verdict: str


@dataclass
class Record:
    """What has happened, as the workers and the leader's log have it."""

    begun: dict[tuple[int, int], Trained] = field(default_factory=dict)  # by worker and step
    done: list[tuple[int, int]] = field(default_factory=list)  # and not skipped
    acks: list[Acknowledged] = field(default_factory=list)
    versions: dict[tuple[int, int], int] = field(default_factory=dict)  # trained with, in a step
    broken_promises: list[str] = field(default_factory=list)
    logs: dict[int, list[messages.Decision]] = field(default_factory=dict)  # of each leader
    losses: dict[int, list[float]] = field(default_factory=dict)  # by worker
    full: dict[int, Tensor] = field(default_factory=dict)  # ... weights that would be saved
    saved_steps: list[int] = field(default_factory=list)
    refused_saves: int = 0


def shapes_of(scenario: Scenario) -> tuple[Callable[[], nn.Module], Callable[..., Tensor], Any]:
    if scenario.model == "mlp":
        return mlp, F.cross_entropy, samples(scenario.samples)
    rows = torch.eye(scenario.samples)
    data = TensorDataset(rows, torch.zeros(scenario.samples))
    return partial(Counts, scenario.samples), counting_loss, data


def train(scenario: Scenario, record: Record, folder: Path, job: Job) -> None:
    make, loss, data = shapes_of(scenario)
    optimizer = OPTIMIZERS[scenario.optimizer]
    if scenario.model == "counts":
        optimizer = partial(torch.optim.SGD, lr=float(scenario.batch))
    options: dict[str, Any] = {}
    if scenario.microbatches > 1:
        options["microbatches"] = scenario.microbatches
    step = job.step(
        make(),
        loss,
        optimizer=optimizer,
        clip_norm=scenario.clip_norm,
        exact=scenario.exact,
        **options,
    )
    job.checkpoints.dry = not scenario.saves
    rank = job.rank
    losses = record.losses[rank] = []
    for epoch in job.epochs(scenario.epochs):
        for batch in job.batches(data, scenario.batch):
            number = step.steps
            record.begun[rank, number] = _trained(batch)
            losses.append(float(step(batch)))
            if not step.sync.is_skipped:
                record.done.append((rank, number))
        if scenario.saves:
            _save(scenario, record, folder, job, epoch)

    def look() -> list[float]:
        with step.sync.full_weights():
            record.full[rank] = _weights_of(step.model)
        return record.full[rank].tolist()

    # as job.evaluate does: those that came back take part, and a loss is survived
    seen = job._meetings.hold(look)
    record.full.setdefault(rank, torch.tensor(seen))


def _weights_of(model: nn.Module) -> Tensor:
    """Those that are here, of a pipeline."""
    held = [p.detach().flatten() for p in model.parameters() if p.device.type != "meta"]
    return torch.cat(held).clone()


def _save(scenario: Scenario, record: Record, folder: Path, job: Job, number: int) -> None:
    disk = next((f for f in scenario.faults if isinstance(f, FullDisk) and f.save == number), None)
    try:
        # by the worker that writes: what others patch at the same time would stay
        with full_disk(disk.num_bytes) if disk is not None and job.rank == 0 else nullcontext():
            job.save(folder)
    except CheckpointError:
        record.refused_saves += job.rank == 0
    else:
        if job.rank == 0:
            record.saved_steps.append(job.steps)


def _trained(batch: Any) -> Trained:
    rows, *_ = batch
    if rows.dim() != 2 or rows.shape[0] != batch.rows:
        return Trained((), batch.total)
    numbers = rows.argmax(1).tolist()
    ends = itertools.accumulate(max(1, size) for size in batch.microbatch_sizes)
    sizes = zip(batch.microbatch_sizes, ends, strict=True)
    return Trained(tuple(n for size, end in sizes for n in numbers[end - size : end]), batch.total)


class Copies:
    """The copies of all shards, as one who sees all of them does."""

    def __init__(self, time: VirtualTime):
        self._time = time
        self._all: list[tuple[VirtualProcess, ChainCore]] = []
        self._logged = defaultdict[ChainNode, set[PushKey]](set)

    def made(self, copy: ChainCore) -> None:
        self._all.append((self._time.current.group, copy))

    def logged(self, copy: ChainCore, operation: Operation) -> None:
        if isinstance(operation, Pushed):
            push = operation.worker, operation.incarnation, operation.sequence
            self._logged[copy.node].add((operation.model, *push))

    def without(self, push: PushKey, shard: int) -> list[str]:
        """Members of the latest chain of a shard that run, and have not got this push."""
        copies = [(process, copy) for process, copy in self._all if copy.place.shard == shard]
        latest = max((copy.node.config for _, copy in copies), key=lambda config: config.epoch)
        return [
            process.name
            for process, copy in copies
            if latest.has(copy.place.copy, copy.node.incarnation)
            and not process.is_dead
            and copy.place.consistency == "strong"
            and not self._has(copy, push)
        ]

    def _has(self, copy: ChainCore, push: PushKey) -> bool:
        model, worker, incarnation, sequence = push
        if push in self._logged[copy.node] or model not in copy.host.models:
            return True
        member = copy.host.models[model].membership.members.get(worker)  # as a snapshot has it
        is_known = member is not None and member.incarnation == incarnation
        return is_known and member.pushes.committed >= sequence


@contextmanager
def recording(record: Record, time: VirtualTime) -> Iterator[None]:
    """Write down acknowledgements, as workers get them, and decisions of the first leader."""
    alive: list[ModelState] = []  # so that none has the number of another one
    decide, apply = Client.decide, ModelState.apply
    make, carry_out, answered = ChainCore.__init__, ChainCore._carry_out, ChainRoute.answered
    copies = Copies(time)

    def decided(self: Client, commit: messages.Commit, *args: Any) -> messages.Ack:
        record.versions[self.rank, commit.step] = commit.version
        ack = decide(self, commit, *args)
        record.acks.append(Acknowledged(self.rank, commit.step, ack.verdict))
        return ack

    def applied(self: ModelState, decision: messages.Decision) -> None:
        apply(self, decision)
        if self.spec.index == 0:
            record.logs.setdefault(id(self), []).append(decision)
            alive.append(self)

    def made(self: ChainCore, *args: Any) -> None:
        make(self, *args)
        copies.made(self)

    def carried_out(self: ChainCore, effect: Any) -> None:
        if isinstance(effect, Entry):
            copies.logged(self, effect.op.operation)
        carry_out(self, effect)

    def acknowledged(self: ChainRoute, channel: Any, request: Request, began_s: float) -> None:
        header = self.caller.header
        push = header.model, header.worker, header.incarnation, request.sequence
        if request.kind is FrameKind.COMMIT and (missing := copies.without(push, self.index)):
            record.broken_promises.append(
                f"push {request.sequence} of rank {self.rank} is acknowledged, without {missing}"
            )
        answered(self, channel, request, began_s)

    with (
        mock.patch.object(Client, "decide", decided),
        mock.patch.object(ModelState, "apply", applied),
        mock.patch.object(ChainCore, "__init__", made),
        mock.patch.object(ChainCore, "_carry_out", carried_out),
        mock.patch.object(ChainRoute, "answered", acknowledged),
    ):
        yield


Log = list[messages.Decision]


def whole_log(record: Record) -> Log:
    """Of the leader, or of the copy of it that has applied most from the start on."""
    return max(record.logs.values(), key=len, default=[])


def counts_from_log(scenario: Scenario, record: Record, log: Log) -> Tensor:
    """The weights of `Counts` that the leader's decisions and the workers' batches lead to."""
    weights = torch.zeros(scenario.samples, dtype=torch.float64)
    for divisor, pushes in updates_of(log):
        for worker_and_step in pushes:
            trained = record.begun[worker_and_step]
            for sample in trained.samples:
                weights[sample] += scenario.batch / trained.total / divisor
    return weights


def updates_of(log: Log) -> Iterator[tuple[float, list[tuple[int, int]]]]:
    """What each update was divided by, and its pushes: worker and step."""
    counted: list[tuple[int, int]] = []
    for decision in log:
        if isinstance(decision, messages.PushDecided) and decision.verdict != "dropped":
            counted.append((decision.worker, decision.step))
        elif isinstance(decision, messages.StepApplied):
            yield decision.divisor, counted
            counted = []


def slowest_by_version(log: Log, workers: int) -> dict[int, int]:
    """The most steps that all live workers had done while the weights were of a version."""
    clocks, live = [0] * workers, set(range(workers))
    found = defaultdict[int, int](int)
    version = 0
    for decision in log:
        if isinstance(decision, messages.PushDecided):
            clocks[decision.worker] = decision.step + 1
        elif isinstance(decision, messages.WorkerLeft):
            live.discard(decision.worker)
        elif isinstance(decision, messages.WorkerJoined):
            live.add(decision.worker)
            clocks[decision.worker] = max(decision.step, clocks[decision.worker])
        elif isinstance(decision, messages.StepApplied):
            version = decision.version
        if not isinstance(decision, messages.PushDecided):  # its update follows at once
            slowest = min((clocks[worker] for worker in live), default=max(clocks))
            found[version] = max(found[version], slowest)
    return found


def pushes_in(log: Log) -> dict[tuple[int, int], list[str]]:
    """Verdicts by worker and step."""
    found = defaultdict[tuple[int, int], list[str]](list)
    for decision in log:
        if isinstance(decision, messages.PushDecided):
            found[decision.worker, decision.step].append(decision.verdict)
    return found
