"""What a run tells while it trains: to objects of the user, to a file of lines, to TensorBoard.

class ToMlflow(shoal.Callback):
    def on_step(self, step, metrics):
        mlflow.log_metrics(metrics, step)

shoal.run(train, callbacks=[ToMlflow()])
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.errors import BadInput

_LOOK_S = 1.0  # how often lost workers are looked for
Metrics = dict[str, float]


class Callback:
    """Methods that a run calls on its first worker; after its loss, on the next one.

    `step` counts from 1. An exception in a method ends the run. `every` is how many steps lie
    between two calls of `on_step`: each call waits for the loss, which on a GPU is still computed.
    """

    every = 1

    def on_step(self, step: int, metrics: Metrics) -> None:
        """A step has ended: its "loss"."""

    def on_log(self, step: int, metrics: Metrics) -> None:
        """`job.log` was called with these."""

    def on_evaluate(self, step: int, metrics: Metrics) -> None:
        """`job.evaluate` has found these; "value" where the metric is one number."""

    def on_checkpoint(self, step: int, path: str) -> None:
        """A checkpoint of all workers is complete."""

    def on_loss_of_worker(self, step: int, rank: int) -> None:
        """A worker was lost, and the others go on."""

    def on_end(self, report: dict[str, Any]) -> None:
        """Training has ended well; `report` is `job.report()`."""


class JsonLines(Callback):
    """`--jsonl FILE`: one JSON object a line, with the event, the step, and seconds since 1970."""

    def __init__(self, file: Path):
        self._file = file

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._write("step", step, metrics=metrics)

    def on_log(self, step: int, metrics: Metrics) -> None:
        self._write("log", step, metrics=metrics)

    def on_evaluate(self, step: int, metrics: Metrics) -> None:
        self._write("evaluate", step, metrics=metrics)

    def on_checkpoint(self, step: int, path: str) -> None:
        self._write("checkpoint", step, path=path)

    def on_loss_of_worker(self, step: int, rank: int) -> None:
        self._write("loss_of_worker", step, rank=rank)

    def on_end(self, report: dict[str, Any]) -> None:
        self._write("end", report["steps"], samples_per_s=report["samples_per_s"])

    def _write(self, event: str, step: int, **more: Any) -> None:
        if "metrics" in more:  # JSON has no nan
            given = more["metrics"].items()
            more["metrics"] = {k: v if math.isfinite(v) else str(v) for k, v in given}
        line = json.dumps({"event": event, "step": step, "time": time.time(), **more})
        with self._file.open("a", encoding="utf-8") as out:
            out.write(line + "\n")


class TensorBoard(Callback):
    """`--tensorboard DIR`: scalars for `tensorboard --logdir DIR`."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise BadInput("--tensorboard needs tensorboard: pip install tensorboard") from None
        self._writer = SummaryWriter(str(folder))

    def on_step(self, step: int, metrics: Metrics) -> None:
        self._add("train", step, metrics)

    def on_log(self, step: int, metrics: Metrics) -> None:
        self._add("log", step, metrics)

    def on_evaluate(self, step: int, metrics: Metrics) -> None:
        self._add("evaluate", step, metrics)

    def on_end(self, report: dict[str, Any]) -> None:
        self._writer.close()

    def _add(self, group: str, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)


class Callbacks:
    """All callbacks of a job, which only its first worker calls.

    `lost()` are the ranks that were lost while the others go on.
    """

    def __init__(
        self,
        given: Sequence[Callback],
        is_first: Callable[[], bool],
        lost: Callable[[], Iterable[int]],
    ):
        self._given = list(given)
        self._is_first = is_first
        self._lost = lost
        self._known_lost: set[int] = set()
        self._looked_s = time.monotonic()

    def __bool__(self) -> bool:
        return bool(self._given)

    def step(self, step: int, loss: Tensor) -> None:
        if not self._given or not self._is_first():
            return
        due = [each for each in self._given if step % each.every == 0]
        if due:
            metrics = {"loss": float(loss)}
            for each in due:
                each.on_step(step, dict(metrics))
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._look(step)

    def log(self, step: int, metrics: Mapping[str, float | Tensor]) -> None:
        if self._given and self._is_first():
            self.tell("on_log", step, numbers_of(metrics))

    def end(self, report: dict[str, Any]) -> None:
        if self._given and self._is_first():
            self._look(report["steps"])
        self.tell("on_end", report)

    def tell(self, event: str, *values: Any) -> None:
        for each in self._given if self._is_first() else ():
            getattr(each, event)(*values)

    def _look(self, step: int) -> None:
        self._looked_s = time.monotonic()
        for rank in sorted(set(self._lost()) - self._known_lost):
            self._known_lost.add(rank)
            self.tell("on_loss_of_worker", step, rank)


def numbers_of(metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"job.log shows numbers, and each of a dict by job.log(**it): {error}"
        ) from None
