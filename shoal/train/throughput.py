"""How fast a run trains, of the job and of a rank; its losses, and whether they stay finite."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import CheckFailed
from shoal.runtime import clock

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
        """A step has ended; it counts as `steps` where replicas take batches in turns."""
        self._steps += steps
        self._calls += 1
        if self._calls % self._every:
            return
        self._marks.append(
            Mark(clock.monotonic_ns(), self._steps, self._rank_samples, time.process_time_ns())
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
        first = self._marks[int(_WARM_UP * len(self._marks))] if self._marks else None
        last = self._marks[-1] if self._marks else None
        seconds = 0.0 if first is None or last is None else (last.time_ns - first.time_ns) / 1e9
        totals: dict[str, Any] = {"seconds": seconds, "samples": self._rank_samples}
        if first is None or last is None or seconds <= 0:
            unknown = ("steps_per_s", "samples_per_s", "cpu_s_per_step", "measured_ns")
            return {**totals, **dict.fromkeys(unknown)}
        steps = last.steps - first.steps
        return {
            **totals,
            "steps_per_s": steps / seconds,
            "cpu_s_per_step": (last.cpu_ns - first.cpu_ns) / 1e9 / steps,
            "samples_per_s": (last.samples - first.samples) / self._sharing / seconds,
            "measured_ns": [first.time_ns - origin_ns, last.time_ns - origin_ns],
        }


class LossWatch:
    """Says in which step a loss was first not a finite number, or stops the run there.

    Ranks whose replicas take every step together have the same loss: all of them stop.

    On a CPU a loss is looked at in its step, elsewhere now and then: it would wait for it.
    """

    def __init__(self, say: Callable[[str], None]):
        self.reported: int | None = None  # the step
        self._say = say
        self._noted: list[tuple[int, Tensor]] = []
        self._stops = False

    def note(self, step: int, loss: Tensor, stops: bool = False) -> None:
        """The loss of a step; `stops`: one that is not finite ends the run."""
        self._stops |= stops
        if self.reported is None:
            self._noted.append((step, loss.detach()))
            if loss.device.type == "cpu" or len(self._noted) == _LOOK_EVERY:
                self.look()

    def look(self) -> None:
        """Say what was noted."""
        noted, self._noted = self._noted, []
        for step, loss in noted:
            if not all(map(math.isfinite, loss.flatten().tolist())):
                self._tell(step)
                return

    def _tell(self, step: int) -> None:
        self.reported = step
        found = f"the loss of step {step} is not a finite number (nan or inf)"
        if self._stops:
            raise CheckFailed(
                f"{found}: the run stops, and checkpoints of earlier steps are kept; "
                'job.step(…, on_nan="skip") leaves out such steps, "go on" trains on'
            )
        self._say(found)


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
        found = [loss.double().reshape(()) for loss in self.losses]
        return torch.stack(found).tolist() if found else []

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
