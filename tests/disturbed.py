"""Elastic runs of processes that are disturbed at random moments, compared with an undisturbed run.

The run trains `tests/elastic_train.py`. Workers that are killed are started again.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
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
from tests.elastic_train import BATCH, SAMPLES

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


@dataclass
class DisturbedRun:
    """`options` are those of `shoal run`, with the strategy. Nothing is left of it at its end."""

    folder: Path
    options: Sequence[str]
    workers: int = 4
    steps: int = 3000
    recipe: str = "tally"
    waits_at: int | None = None  # after this step all wait until a worker has come later
    waits_s: list[float] = field(default_factory=list)  # until the next step without the lost one
    stdout: str = ""
    stderr: str = ""

    def kill_often(self, kills: int, seed: int, env: dict[str, str] | None = None) -> None:
        """A worker at a time, at random moments at which all are there; then comes its end."""
        self.options = [*self.options, "--restart", str(kills + 10)]
        choose = random.Random(seed)
        with self.going_on(env):
            for _ in range(kills):
                self.until_all_are_there()
                time.sleep(choose.uniform(0.0, 1.0))
                self._kill(choose.choice(sorted(self.log.present())))

    def _kill(self, victim: GroupMember) -> None:
        """Then wait for a step of a group without it."""
        start_s = time.monotonic()
        os.kill(self.log.processes()[victim], signal.SIGKILL)

        def next_step() -> NotedStep | None:
            steps = self.log.read()
            return next((s for s in steps if s.time_s > start_s and victim not in s.members), None)

        self.waits_s.append(self.until(next_step, "go on").time_s - start_s)

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
        command = [sys.executable, "-m", "shoal", "run", *options]
        command += ["--report", str(self.folder / "report.json")]
        command += [str(SCRIPT), str(self.folder), str(self.steps), self.recipe]
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

    def until_all_are_there(self) -> None:
        def are_there() -> bool:
            present = self.log.present()
            return len(present) == self.workers and present <= self.log.processes().keys()

        self.until(are_there, "be complete")

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
