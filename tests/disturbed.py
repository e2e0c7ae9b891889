"""Elastic runs of processes that are disturbed at random moments, compared with an undisturbed run.

The run trains `tests/elastic_train.py`. A disturbance is a signal to some of its workers; those
that end are started again.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import torch

from shoal.comm.members.board import GroupMember
from shoal.train.checkpoints import files
from tests import forked
from tests.elastic_recipes import BATCH, SAMPLES

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).parent / "elastic_train.py"
PATIENCE_S = 120.0
_LOOK_S = 0.01


class NotedStep(NamedTuple):
    """A step that a worker has ended, and the processes that formed its group."""

    time_s: float
    worker: int
    step: int
    members: frozenset[GroupMember]


@dataclass
class StepLog:
    """What the workers of a run have noted, read as it grows."""

    folder: Path
    steps: list[NotedStep] = field(default_factory=list)
    _position: int = 0

    def read(self) -> list[NotedStep]:
        with suppress(FileNotFoundError), (self.folder / "log").open() as file:
            file.seek(self._position)
            text = file.read()
            text = text[: text.rfind("\n") + 1]
            self._position += len(text)
            self.steps += map(_noted, text.splitlines())
        return self.steps

    def processes(self) -> dict[GroupMember, int]:
        """The latest process of each worker that has begun to train: its process id."""
        found = {}
        for file in self.folder.glob("process-*[0-9]"):
            pid, incarnation = map(int, file.read_text().split())
            found[GroupMember(int(file.name.partition("-")[2]), incarnation)] = pid
        return found

    def present(self) -> frozenset[GroupMember]:
        """The processes that formed the latest group."""
        return self.read()[-1].members if self.read() else frozenset()


def _noted(line: str) -> NotedStep:
    time_s, worker, step, members = line.split()
    pairs = (member.split(".") for member in members.split(","))
    return NotedStep(
        float(time_s), int(worker), int(step), frozenset(GroupMember(*map(int, p)) for p in pairs)
    )


@dataclass(frozen=True)
class Disturbances:
    """What happens to a run.

    `at_once` workers get the signal at one moment. `worker`: always this one is among them.
    `newcomers`: at moments at which a worker that was started again is about to join; else at
    moments at which all workers are there.
    """

    number: int = 20
    seed: int = 17
    at_once: int = 1
    worker: int | None = None
    newcomers: bool = False
    by: signal.Signals = signal.SIGKILL


@dataclass
class DisturbedRun:
    """`options` are those of `shoal run`, with the strategy. Nothing is left of it at its end."""

    folder: Path
    options: Sequence[str]
    workers: int = 4
    steps: int = 3000
    recipe: str = "tally"
    waits_at: int | None = None  # after this step all wait until a worker has come later
    waits_s: list[float] = field(default_factory=list)  # until the next step without the lost ones
    stdout: str = ""
    stderr: str = ""

    def run(self, what: Disturbances, env: dict[str, str] | None = None) -> None:
        """Disturb it so often, and let it come to its end."""
        restarts = ["--restart", str(what.number * (what.at_once + what.newcomers) + 10)]
        self.options = [*self.options, *restarts]
        with self.going_on(env):
            self._disturb(what)

    @contextmanager
    def going_on(self, env: dict[str, str] | None = None) -> Iterator[None]:
        """While the block runs it is slow; then it comes to its end."""
        self.folder.mkdir(exist_ok=True)
        self.log = StepLog(self.folder)
        with (
            (self.folder / "stdout").open("w+") as out,
            (self.folder / "stderr").open("w+") as err,
        ):
            self._process = self._start(self.options, out, err, env)
            try:
                yield
                (self.folder / "enough").touch()
                status = self._process.wait(600)
            finally:
                self._end()
            out.seek(0)
            err.seek(0)
            self.stdout, self.stderr = out.read(), err.read()
        assert status == 0, self.stderr

    def _start(
        self, options: Sequence[str], out: IO[str], err: IO[str], env: dict[str, str] | None
    ) -> forked.Popen:
        command = [sys.executable, "-m", "shoal", "run", str(SCRIPT), *options]
        command += ["--report", str(self.folder / "report.json"), "--"]
        command += [str(self.folder), str(self.steps), self.recipe]
        command += [] if self.waits_at is None else [str(self.waits_at)]
        return forked.Popen(command, cwd=ROOT, stdout=out, stderr=err, env=env)

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(30)

    def alone(self, env: dict[str, str] | None = None) -> None:
        """What one worker that is never disturbed saves."""
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "stdout").open("w") as out:
            process = self._start(["-n", "1"], out, out, env)
            assert process.wait(600) == 0, (self.folder / "stdout").read_text()

    # ------------------------------------------------------------------ what happens to it

    def _disturb(self, what: Disturbances) -> None:
        choose = random.Random(what.seed)
        for _ in range(what.number):
            self.until_all_are_there()
            time.sleep(choose.uniform(0.0, 1.0))
            lost = self._signal(self._choose(what, choose), what.by)
            if what.newcomers:
                newcomer = self._until_one_comes(lost)
                time.sleep(choose.uniform(0.0, 0.2))
                present = sorted(self.log.present() - set(lost))
                self._signal([choose.choice([newcomer, newcomer, *present])], what.by)

    def _choose(self, what: Disturbances, choose: random.Random) -> list[GroupMember]:
        present = sorted(self.log.present())
        first = [member for member in present if member.worker == what.worker]
        others = [member for member in present if member not in first]
        return first + choose.sample(others, what.at_once - len(first))

    def _signal(self, members: Sequence[GroupMember], number: signal.Signals) -> list[GroupMember]:
        """Then wait for a step of a group without them."""
        processes = self.log.processes()
        start_s = time.monotonic()
        for member in members:
            os.kill(processes[member], number)
        step = self.until(lambda: self._first_without(set(members), start_s), "go on")
        self.waits_s.append(step.time_s - start_s)
        return list(members)

    def _first_without(self, members: set[GroupMember], start_s: float) -> NotedStep | None:
        after = (s for s in self.log.read() if s.time_s > start_s and not members & s.members)
        return next(after, None)

    def until_all_are_there(self) -> None:
        processes = self.log.processes
        self.until(
            lambda: (
                len(self.log.present()) == self.workers and self.log.present() <= processes().keys()
            ),
            "be complete",
        )

    def _until_one_comes(self, lost: Sequence[GroupMember]) -> GroupMember:
        return self.until(
            lambda: next(
                (
                    member
                    for member in self.log.processes()
                    if any(m.worker == member.worker and m < member for m in lost)
                ),
                None,
            ),
            "come back",
        )

    def until(self, found: Callable[[], T | None], what: str) -> T:
        deadline_s = time.monotonic() + PATIENCE_S
        while not (result := found()):
            status = self._process.poll()
            ended = f"it has ended with {status}" if status is not None else "it has not"
            said = (self.folder / "stderr").read_text()[-3000:]
            is_late = time.monotonic() > deadline_s
            assert status is None and not is_late, f"the run was to {what}, and {ended}:\n{said}"
            time.sleep(_LOOK_S)
        return result

    # ------------------------------------------------------------------ what comes of it

    def bits(self) -> str:
        """A digest of the weights, averages and optimizer state that it has saved."""
        saved = files.read(self.folder / "saved")
        tensors = sorted({**saved.model, **saved.optimizer}.items())
        parts = [name.encode() + tensor.numpy().tobytes() for name, tensor in tensors]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def trains_each_sample_once(self) -> bool:
        """In each epoch; the model counts them."""
        counts = -files.read(self.folder / "saved").model["0:counts"]
        epochs = torch.full_like(counts, self.steps * BATCH / SAMPLES)
        return torch.allclose(counts, epochs, rtol=0, atol=0.1)

    def summary(self, what: Disturbances) -> str:
        median_s, longest_s = statistics.median(self.waits_s), max(self.waits_s)
        return (
            f"{' '.join(self.options)}, {self.recipe}: {len(self.waits_s)} times "
            f"{what.at_once} x {what.by.name} (seed {what.seed}); the next step had ended "
            f"{median_s:.2f} s after it (median), {longest_s:.2f} s at most"
        )
