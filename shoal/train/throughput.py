"""How fast a run trains, of the job and of a rank; its losses, and whether they stay finite."""

from __future__ import annotations

import math
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import CheckFailed
from shoal.runtime import clock
from shoal.runtime.waits import is_waiting

if TYPE_CHECKING:
    from shoal.train.job import Job
    from shoal.train.step.step import Step

_MAX_MARKS = 512
_LOOK_EVERY = 100  # steps, at losses of a device that computes while the script goes on
_WARM_UP = 0.2  # the fraction of steps in which workers that started late catch up


class Mark(NamedTuple):
    """The end of a step: its time, and what had been done by then."""

    time_ns: int
    steps: int
    samples: int
    cpu_ns: int  # of all threads of this process


class Throughput:
    """Counts the samples of the job and of this rank, and the steps of the job.

    `sharing` ranks compute the same samples: those of a replica that tp, pp or cp splits.
    `present` is the fraction of the samples of a batch whose ranks are there.
    """

    def __init__(self, sharing: int = 1) -> None:
        self._sharing = sharing
        self.present = 1.0
        self._rank_samples = 0
        self._steps = 0
        self._calls = 0
        self._every = 1
        self._marks: list[Mark] = []
        self.restart()

    def restart(self) -> None:
        """Measure the speed of progress from the next `progress` on."""
        self._job_samples = 0.0
        self._start_steps = 0
        self._start_ns: int | None = None

    @property
    def samples(self) -> float:
        """Of this rank, up to now: its share of the replica's."""
        return self._rank_samples / self._sharing

    def add_samples(self, job: int, rank: int) -> None:
        """A batch of `job` samples begins, `rank` of them on this rank."""
        self._job_samples += job * self.present
        self._rank_samples += rank

    def recount_samples(self, before: int, now: int) -> None:
        """A batch was split again: `now` of its samples are on this rank, not `before`."""
        self._rank_samples += now - before

    def end_step(self, steps: int = 1) -> None:
        """A step has ended. It counts as `steps`: several where replicas take batches in turns,
        none where it was skipped."""
        self._steps += steps
        self._calls += 1
        if self._calls % self._every:
            return
        self._marks.append(
            Mark(clock.monotonic_ns(), self._steps, self._rank_samples, clock.process_time_ns())
        )
        if len(self._marks) > _MAX_MARKS:  # keep every second one
            self._marks = self._marks[1::2]
            self._every = 2 * self._every

    def progress(self, steps: int, total: int | None) -> dict[str, float | None]:
        """Samples per second of the job up to now, and the time left at that speed."""
        now_ns = clock.monotonic_ns()
        if self._start_ns is None:  # the first step has start-up costs: measure from its end
            self._start_ns = now_ns
            self._start_steps = steps
            self._job_samples = 0.0
        passed_s = (now_ns - self._start_ns) / 1e9
        done = steps - self._start_steps
        if passed_s <= 0 or done <= 0:
            return {"samples_per_s": None, "left_s": None}
        left_s = None if total is None else passed_s / done * (total - steps)
        return {"samples_per_s": self._job_samples / passed_s, "left_s": left_s}

    def report(self, origin_ns: int = 0) -> dict[str, Any]:
        """The speeds of this rank, without the first fifth of the steps.

        `samples_per_s` is its share of the replica's, so that the sum over ranks is the job's.
        `cpu_s_per_step` are seconds of processors, of all threads of this process.
        `measured_ns` is when speeds were measured, on the clock of a trace with that origin.
        """
        marks = self._marks or [Mark(0, 0, 0, 0)]
        first = marks[int(_WARM_UP * len(marks))]
        last = marks[-1]
        seconds = (last.time_ns - first.time_ns) / 1e9
        steps = last.steps - first.steps
        totals: dict[str, Any] = {"seconds": seconds, "samples": self._rank_samples}
        if seconds <= 0 or not steps:
            unknown = ("steps_per_s", "samples_per_s", "cpu_s_per_step", "measured_ns")
            return {**totals, **dict.fromkeys(unknown)}
        return {
            **totals,
            "steps_per_s": steps / seconds,
            "cpu_s_per_step": (last.cpu_ns - first.cpu_ns) / 1e9 / steps,
            "samples_per_s": (last.samples - first.samples) / self._sharing / seconds,
            "measured_ns": [first.time_ns - origin_ns, last.time_ns - origin_ns],
        }


def _values(losses: Sequence[Tensor]) -> list[float]:
    """The numbers in them; a device is waited for once."""
    if len(losses) < 2:
        return [float(loss) for loss in losses]
    values: list[float] = torch.stack([loss.double().reshape(()) for loss in losses]).tolist()
    return values


class LossWatch:
    """Says in which step a loss was first not a finite number, or stops the run there.

    Ranks whose replicas take every step together have the same loss: all of them stop.

    On a CPU a loss is looked at in its step, elsewhere now and then: it would wait for it.
    """

    def __init__(self, say: Callable[[str], None], is_scaled: Callable[[], bool] = lambda: False):
        """`is_scaled`: the script skips steps of losses that are too large by itself."""
        self.reported: int | None = None  # the step
        self._is_scaled = is_scaled
        self._say = say
        self._noted: list[tuple[int, Tensor]] = []
        self._stops = False

    def note(self, step: int, loss: Tensor, stops: bool = False) -> None:
        """The loss of a step; `stops`: one that is not finite ends the run."""
        self._stops |= stops
        if self.reported is None:
            self._noted.append((step, loss.detach() if loss.requires_grad else loss))
            if loss.device.type == "cpu" or len(self._noted) == _LOOK_EVERY:
                self.look()

    def look(self) -> None:
        """Say what was noted."""
        noted = self._noted
        self._noted = []
        values = _values([loss for _, loss in noted])
        for (step, _), loss in zip(noted, values, strict=True):
            if not math.isfinite(loss):
                self.reported = step
                found = f"the loss of step {step} is not a finite number (nan or inf)"
                if self._stops and not self._is_scaled():
                    raise CheckFailed(
                        f"{found}: the run stops, and checkpoints of earlier steps are kept; "
                        'on_nan="skip" of job.step and job.setup leaves out such steps, "go on" '
                        "trains on"
                    )
                self._say(found)
                return


class StepRecord:
    """The loss of every step, and when it ended: for `--record` and `shoal compare`."""

    def __init__(self, job: Job) -> None:
        self.losses: list[Tensor] = []
        self.ends: list[tuple[int, int]] = []  # the step, and its time on the monotonic clock
        self._job = job
        self._microbatches = 1
        job.on_step.append(self._note)

    def _note(self, step: Step, loss: Tensor) -> None:
        """The loss is not waited for."""
        self.losses.append(loss.detach())
        self.ends.append((self._job.steps, clock.monotonic_ns()))
        self._microbatches = step.cutter.local_microbatches

    def values(self) -> list[float]:
        return _values(self.losses)

    def report(self, origin_ns: int) -> dict[str, Any]:
        """JSON-able: a loss that is no finite number is None. Times are on the trace's clock."""
        device = self._job.device
        is_cuda = device.type == "cuda"
        return {
            "losses": [loss if math.isfinite(loss) else None for loss in self.values()],
            "loss_steps": [step for step, _ in self.ends],
            "loss_s": [round((ns - origin_ns) / 1e9, 6) for _, ns in self.ends],
            "microbatches": self._microbatches,
            "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            "peak_device_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None,
        }


# ---------------------------------------------------------------------- the table of workers

_LOOK_S = 0.05
_LOOKS_PER_RECORD = 10
_LOOKS = 100  # of which the waiting share and the speed are


class _Look(NamedTuple):
    time_s: float
    steps: int
    samples: float
    waits: bool


class LiveSender:
    """How far this worker is, for the table of workers that the launcher shows in a terminal.

    A thread looks twenty times a second whether the training thread waits, and tells the launcher
    twice a second, once there is a job; a step does nothing for it. The threads of all workers
    look at the same moments of the host's clock, so that their steps can be compared.
    """

    def __init__(self, rank: int, send: Callable[[Mapping[str, Any]], None]):
        self._job: Job | None = None
        self._rank = rank
        self._send = send
        self._watched = threading.get_ident()
        self._first_step: int | None = None
        self._looks: deque[_Look] = deque(maxlen=_LOOKS)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-live", daemon=True)

    def __enter__(self) -> LiveSender:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def watch(self, job: Job) -> Job:
        self._job = job
        return job

    def look(self, job: Job) -> None:
        self._first_step = job.steps if self._first_step is None else self._first_step
        if self._looks and job.steps > self._looks[0].steps == self._first_step:
            self._looks.clear()  # the first step has start-up costs: measure from its end
        waits = is_waiting(self._watched)
        self._looks.append(_Look(time.monotonic(), job.steps, job._throughput.samples, waits))

    def record(self) -> dict[str, Any]:
        first = self._looks[0]
        last = self._looks[-1]
        passed_s = max(last.time_s - first.time_s, 1e-9)
        recent = list(self._looks)[-_LOOKS_PER_RECORD:]
        state = "starting" if last.steps == self._first_step else "training"
        return {
            "rank": self._rank,
            "step": last.steps,
            "steps_per_s": (last.steps - first.steps) / passed_s,
            "samples_per_s": (last.samples - first.samples) / passed_s,
            "waiting": sum(look.waits for look in self._looks) / len(self._looks),
            "state": "waiting" if all(look.waits for look in recent) else state,
        }

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S - time.monotonic() % _LOOK_S):
            if self._job is not None:
                self.look(self._job)
                if round(time.monotonic() / _LOOK_S) % _LOOKS_PER_RECORD == 0:
                    self._send(self.record())
        if self._job is not None:  # the last step
            self.look(self._job)
            self._send(self.record())
