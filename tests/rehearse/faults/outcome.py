"""Runs a scenario, and judges how it ended."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.cluster import Cluster, Noise
from shoal.cluster.presets import load_cluster
from shoal.errors import ShoalError
from shoal.plan.step.slow_workers import Unevenness
from shoal.rehearse import world
from shoal.rehearse.losses import Loss, Losses
from shoal.rehearse.pace import WorkerTimes
from shoal.rehearse.world import RehearsalSpec, Rehearsed, Train, rehearse
from shoal.runtime import clock
from shoal.runtime.checkpoint_folders import WORKER_FILE, complete_versions
from shoal.runtime.config import ServerCheckpointConfig
from shoal.server.process import shard_file
from shoal.strategy.strategy import as_strategy
from shoal.train.checkpoints import files, servers
from tests.rehearse.faults.disturbance import (
    LIMIT_S,
    Disturbance,
    DisturbedNetwork,
    DisturbedTime,
    disturbed,
    interruptions,
    saving_servers,
)
from tests.rehearse.faults.scenario import (
    Apart,
    Jitter,
    Kind,
    Long,
    Restarts,
    Scenario,
    ServerDisk,
    Slow,
)
from tests.rehearse.faults.training import (
    Log,
    Record,
    counts_from_log,
    pushes_in,
    recording,
    slowest_by_version,
    train,
    updates_of,
    whole_log,
)
from tests.rehearse.worlds import CLUSTER, TIMES

SINGLE = Kind("single", "equal", (1,))


@dataclass(frozen=True)
class Outcome:
    """`ending`: equal, bits, counted, finite, or a sentence; else what is wrong."""

    seed: int
    ending: str
    said: str = ""  # the sentence, or what is wrong
    seconds: float = 0.0  # virtual
    broken: int = 0  # connections
    is_good: bool = True


class Wrong(Exception):
    """How a run ended is not one of the ways that are allowed."""


class FaultyRehearsal(world._Rehearsal):
    """A rehearsal on a network, and with processes, that a scenario disturbs."""

    time: DisturbedTime
    network: DisturbedNetwork

    def __init__(self, train: Train, spec: RehearsalSpec, scenario: Scenario):
        with disturbed():
            super().__init__(train, spec)
        self.disturbance = self.network.disturbance = Disturbance(scenario, self.time)
        self.errors: list[Exception] = []  # of workers

    def run(self) -> Rehearsed:
        with disturbed():
            return super().run()

    def saves_servers(self, folder: Path, every: int) -> None:
        saves = ServerCheckpointConfig(folder, every)
        self._config = replace(self._config, server_checkpoint=saves)

    def _lose(self, loss: Loss) -> None:
        if (process := self.processes.running.get(f"{loss.role} {loss.number}")) is not None:
            self.disturbance.silence(process)
        super()._lose(loss)

    def lose(self, name: str) -> None:
        """The process of the thread that calls this."""
        self.processes.kill(name)
        clock.check()

    def _work(self, rank: int, incarnation: int) -> None:
        try:
            super()._work(rank, incarnation)
        except Exception as error:
            clock.check()
            self.errors.append(error)
            raise


def run(scenario: Scenario) -> Outcome:
    """Run it, and judge it; raises nothing."""
    before = _Left()
    try:
        with tempfile.TemporaryDirectory() as folder:
            outcome = _run(scenario, Path(folder) / "saved")
        before.check(bool(scenario.killed) or outcome.ending == "sentence")
    except Wrong as wrong:
        return Outcome(scenario.seed, "wrong", str(wrong), is_good=False)
    except Exception as error:
        shown = "".join(traceback.format_exception(error))
        return Outcome(scenario.seed, "traceback", shown, is_good=False)
    return outcome


def _run(scenario: Scenario, folder: Path) -> Outcome:
    record = Record()
    spec = _spec_of(scenario)
    rehearsal = FaultyRehearsal(partial(train, scenario, record, folder), spec, scenario)
    disk = next((fault for fault in scenario.faults if isinstance(fault, ServerDisk)), None)
    shards = folder.parent / "servers"
    if disk is not None:
        rehearsal.saves_servers(shards, disk.every)
    ending, said = "", ""
    interrupted = interruptions(rehearsal.disturbance, rehearsal.lose)
    with recording(record, rehearsal.time), interrupted, saving_servers(disk, shards):
        try:
            rehearsal.run()
        except ShoalError as error:
            ending, said = "sentence", str(error)
    time = rehearsal.time
    for error in rehearsal.errors:
        if not isinstance(error, ShoalError):
            raise error
    if record.broken_promises:
        raise Wrong(record.broken_promises[0])
    if "the rehearsal hangs" in said:
        return Outcome(scenario.seed, "hang", said, time.now_s, is_good=False)
    if rehearsal.errors:
        said = str(rehearsal.errors[0])
    if ending:
        if not scenario.may_fail or "\n" in said:
            raise Wrong(f"ends with an error that these faults do not allow: {said}")
    else:
        ending = check(scenario, record)
    check_saved(scenario, record, folder, is_over=ending != "sentence")
    check_shards(shards)
    return Outcome(scenario.seed, ending, said, time.now_s, rehearsal.disturbance.broken)


def _spec_of(scenario: Scenario) -> RehearsalSpec:
    slow = {fault.name: fault.factor for fault in scenario.faults if isinstance(fault, Slow)}
    workers = {rank: slow.get(f"worker {rank}", 1.0) for rank in range(scenario.workers)}
    noise = [Noise(f.deviation) for f in scenario.faults if isinstance(f, Jitter)]
    return RehearsalSpec(
        as_strategy(scenario.kind.strategy),
        scenario.workers,
        _cluster_of(scenario),
        _times_of(scenario),
        Unevenness(noise[0] if noise else Noise(), scenario.seed, workers),
        seed=scenario.seed % 7,  # few references
        slow_servers={n: slow.get(f"server {n}", 1.0) for n in range(6)},
        losses=_losses_of(scenario),
    )


def _cluster_of(scenario: Scenario) -> Cluster:
    cluster = load_cluster(CLUSTER)
    if not scenario.of(Apart):
        return cluster
    return replace(cluster, node=replace(cluster.node, devices=1))


def _times_of(scenario: Scenario) -> WorkerTimes:
    factor = next((fault.factor for fault in scenario.faults if isinstance(fault, Long)), 1.0)
    passes = ("forward_s", "backward_s", "weight_s")
    longer = {name: tuple(factor * one for one in getattr(TIMES, name)) for name in passes}
    return replace(TIMES, **longer)


def _losses_of(scenario: Scenario) -> Losses:
    moments = []
    for kill in scenario.kills:
        role, number = kill.name.split()
        moments.append(Loss(kill.at_s, role, int(number)))
    if len(scenario.killed) > len(moments):  # one is lost at no moment that is known
        moments.append(Loss(2 * LIMIT_S, "worker", 0))
    again = [fault for fault in scenario.faults if isinstance(fault, Restarts)]
    restarts = (again[0].count, again[0].after_s) if again else (0, 0.001)
    return Losses((), tuple(moments), None, *restarts)


# ---------------------------------------------------------------------- how it may end


def check(scenario: Scenario, record: Record) -> str:
    """The name of the ending; Wrong if it is none that the rule of the strategy allows."""
    if not all(bool(torch.isfinite(weights).all()) for weights in record.full.values()):
        raise Wrong("weights are not finite")
    killed = set(scenario.killed)
    expected = {rank for rank in range(scenario.workers) if f"worker {rank}" not in killed}
    if not record.full or not (scenario.may_fail or expected <= record.full.keys()):
        raise Wrong(f"{len(record.full)} of {scenario.workers} workers have ended")
    rule = scenario.kind.rule
    if rule == "log":
        return _check_log(scenario, record)
    if rule == "equal":
        return _check_equal(scenario, record)
    # what a lost worker has not trained is in no mean
    if rule == "mean" and scenario.model == "counts" and len(record.full) == scenario.workers:
        _check_mean(scenario, record)
        return "equal"
    return "finite"


def _check_equal(scenario: Scenario, record: Record) -> str:
    reference = _reference(_alone(scenario))
    single = reference.full[0]
    if scenario.kind.is_split:
        _check_close("losses", torch.tensor(record.losses[0]), torch.tensor(reference.losses[0]))
        return "equal"
    first = next(iter(record.full.values()))
    for rank, weights in record.full.items():
        if not torch.equal(weights, first):
            raise Wrong(f"rank {rank} has other weights than another one")
        _check_close(f"weights of rank {rank}", weights, single)
    if not scenario.exact:
        return "equal"
    if not torch.equal(first, single):
        raise Wrong("with exact=True the weights are not the bits of one device")
    return "bits"


def _check_mean(scenario: Scenario, record: Record) -> None:
    single = _reference(_alone(scenario)).full[0]
    mean = torch.stack(list(record.full.values())).mean(0)
    _check_close("mean weights of all workers", mean, single)


def _check_close(what: str, found: Tensor, expected: Tensor) -> None:
    if found.shape != expected.shape:
        raise Wrong(f"{what}: {tuple(found.shape)}, and one device has {tuple(expected.shape)}")
    if not torch.allclose(found, expected, rtol=1e-3, atol=2e-4):
        far = float((found - expected).abs().max())
        raise Wrong(f"{what}: up to {far:.3g} from those of one device")


def _check_log(scenario: Scenario, record: Record) -> str:
    """Every gradient that was computed counts as often as the rule says: once, or not at all."""
    if not scenario.has_whole_log:
        return "finite"
    log = whole_log(record)
    pushes = pushes_in(log)
    for worker_and_step, verdicts in pushes.items():
        if len(verdicts) > 1:
            raise Wrong(f"the push of (worker, step) {worker_and_step} counts as {verdicts}")
    if lost := set(record.done) - pushes.keys():
        raise Wrong(f"trained, and not in the log: (worker, step) {sorted(lost)[:8]}")
    if others := pushes.keys() - record.begun.keys():
        raise Wrong(f"in the log, and not computed: (worker, step) {sorted(others)[:8]}")
    if not scenario.killed and len(pushes) > len(record.done):
        raise Wrong("the log has pushes that were not completed")
    for ack in record.acks:
        if ack.verdict not in ("again", *pushes[ack.worker, ack.step]):
            raise Wrong(f"{ack}, and the log says {pushes[ack.worker, ack.step]}")
    for divisor, counted in updates_of(log):
        parts = [record.begun[worker_and_step] for worker_and_step in counted]
        share = sum(len(part.samples) / part.total for part in parts)
        expected = share if "quorum" in scenario.kind.strategy else 1.0
        if abs(divisor - expected) > 1e-5:
            raise Wrong(f"an update of {share:.4f} of a batch is divided by {divisor:.4f}")
    _check_staleness(scenario, record, log)
    expected_counts = counts_from_log(scenario, record, log).float()
    for rank, weights in record.full.items():
        if not torch.allclose(weights, expected_counts, rtol=1e-4, atol=1e-4):
            far = float((weights - expected_counts).abs().max())
            raise Wrong(f"weights of rank {rank}: up to {far:.3g} from those of the log")
    return "counted"


def _check_staleness(scenario: Scenario, record: Record, log: Log) -> None:
    """No worker has trained a step with weights that are older than its bound."""
    term: Any = as_strategy(scenario.kind.strategy).sync
    if term.staleness is None:
        return
    slowest = slowest_by_version(log, scenario.workers)
    for (worker, step), version in record.versions.items():
        if step > slowest[version] + term.staleness:
            raise Wrong(
                f"worker {worker} has trained step {step} with version {version}, when the "
                f"slowest had done {slowest[version]} steps: the bound is {term.staleness}"
            )


def check_saved(scenario: Scenario, record: Record, folder: Path, is_over: bool) -> None:
    """The checkpoint is the latest one that was saved, and nothing else is in its folder."""
    if not scenario.saves or not folder.exists():
        return
    left = [each.name for each in folder.iterdir() if each.name.startswith("saving-")]
    if left:
        raise Wrong(f"saving has left {left}")
    if record.saved_steps and is_over:
        steps = files.read(folder).document["steps"]
        latest = record.saved_steps[-1]  # by worker 0; without it another worker saves
        if steps < latest or (steps > latest and not scenario.killed):
            raise Wrong(f"the checkpoint is of step {steps}, not {latest}")


def check_shards(folder: Path) -> None:
    """Each file that servers have written is whole, and those of a complete version fit."""
    for file in folder.glob("step-*/*.safetensors"):
        if file.name != WORKER_FILE:
            shard_file.read_shard(file)
    for version in complete_versions(folder) if folder.exists() else []:
        servers._assemble(version)


# ---------------------------------------------------------------------- references


def _alone(scenario: Scenario) -> Scenario:
    """The same training on one device, without faults."""
    return replace(
        scenario,
        seed=scenario.seed % 7,
        kind=SINGLE,
        workers=1,
        microbatches=scenario.microbatches if scenario.exact else 1,
        saves=False,
        faults=(),
    )


@lru_cache(maxsize=500)
def _reference(scenario: Scenario) -> Record:
    record = Record()
    rehearse(partial(train, scenario, record, Path()), _spec_of(scenario))
    return record


# ---------------------------------------------------------------------- what is left behind


class _Left:
    """What there is before a run, to see what it leaves behind."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._files = _open_files()

    def check(self, may_be_killed: bool) -> None:
        """Wrong if threads or open files are left; those of a killed process end with it."""
        gc.collect()
        for thread in set(threading.enumerate()) - self._threads:
            thread.join(10.0)
            if thread.is_alive():
                raise Wrong(f"thread {thread.name} is left")
        left = {number: file for number, file in _open_files().items() if number not in self._files}
        if left and not may_be_killed:
            raise Wrong(f"open files are left: {', '.join(left.values())}")
        for number in left:
            os.close(number)


def _open_files() -> dict[int, str]:
    """By descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found
