"""Progress of a run: a bar on a terminal, plain lines elsewhere, JSON lines to a launcher.

Plain lines are printed at fixed steps, so that two runs of one job print the same steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import IO, Any

LINES_PER_RUN = 20
LONGEST_SILENCE_S = 10.0
TERMINAL_PERIOD_S = 0.1


class Progress:
    """Where progress is shown; this one shows nothing. `due` is called every step."""

    def due(self, step: int, total: int | None) -> bool:
        return False

    def show(self, record: Mapping[str, Any]) -> None:
        return None

    def close(self) -> None:
        return None


class ProgressLines(Progress):
    """About twenty lines a run: the first step, the last, and steps at equal distances."""

    def __init__(self, out: IO[str] | None = None):
        self._out = out
        self._last_s = time.monotonic()

    def due(self, step: int, total: int | None) -> bool:
        every = max(1, (total or 50 * LINES_PER_RUN) // LINES_PER_RUN)
        if step == 1 or step == total or step % every == 0:
            return True
        return time.monotonic() - self._last_s > LONGEST_SILENCE_S

    def show(self, record: Mapping[str, Any]) -> None:
        self._last_s = time.monotonic()
        print(line(record), file=self._out or sys.stdout, flush=True)


class ProgressSender(Progress):
    """Sends records to the launcher, which shows them; at most ten a second."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None] = lambda record: None):
        self._send = send
        self._last_s = 0.0

    def due(self, step: int, total: int | None) -> bool:
        return step == total or time.monotonic() - self._last_s > TERMINAL_PERIOD_S

    def show(self, record: Mapping[str, Any]) -> None:
        self._last_s = time.monotonic()
        self._send(record)


class ProgressBar(ProgressSender):
    """A live bar on a terminal: step, loss, samples per second, time left."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import RenderableType
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        below = self.below

        class Bar(RichProgress):
            def get_renderables(self) -> Iterable[RenderableType]:
                yield from super().get_renderables()
                yield from below()

        self._rich = Bar(
            TextColumn("step {task.completed:.0f}/{task.fields[of]}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            transient=False,
        )
        self._task = self._rich.add_task("", total=None, of="?", text="", visible=False)

    def show(self, record: Mapping[str, Any]) -> None:
        self._rich.start()  # the first time
        super().show(record)
        total = record.get("total")
        self._rich.update(
            self._task,
            completed=record.get("step", 0),
            total=total,
            of=total or "?",
            text=details(record),
            visible=True,
        )

    def below(self) -> Iterable[Any]:
        """What is shown under the bar."""
        return ()

    def print(self, text: str, is_stderr: bool = False) -> None:
        """Print a line above the bar."""
        line = text.removesuffix("\n")
        self._rich.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._rich.stop()


def for_worker(
    rank: int, size: int, send: Callable[[Mapping[str, Any]], None] | None, takes_over: bool = False
) -> Progress:
    """How a rank shows progress: only rank 0 shows anything, through `send` if there is one.

    A bar needs a terminal for one worker alone; mpirun gives one to each of many. `takes_over`:
    rank 0 may be lost, and then this one may be the first.
    """
    if rank != 0 and not takes_over:
        return Progress()
    if send is not None:
        return ProgressSender(send)
    return ProgressBar() if size == 1 and sys.stdout.isatty() else ProgressLines()


def open_progress(progress_fd: int | None) -> Callable[[Mapping[str, Any]], None] | None:
    """A function that sends one record to the launcher; None without a pipe to it.

    It never blocks: a record is dropped when the pipe is full, so progress does not slow training.
    """
    if progress_fd is None:
        return None
    os.set_inheritable(progress_fd, False)
    os.set_blocking(progress_fd, False)
    is_torn = False

    def send(record: Mapping[str, Any]) -> None:
        nonlocal is_torn
        line = b"\n" * is_torn + json.dumps(record).encode() + b"\n"
        with suppress(BlockingIOError, BrokenPipeError):
            is_torn = os.write(progress_fd, line) < len(line)

    return send


def line(record: Mapping[str, Any]) -> str:
    total = record.get("total")
    return f"step {record['step']}{f'/{total}' if total else ''}  {details(record)}"


def details(record: Mapping[str, Any]) -> str:
    """Metrics, speed and time left, as text; the same for lines and for the bar."""
    words = [f"{name} {_number(value)}" for name, value in dict(record.get("metrics", {})).items()]
    if record.get("samples_per_s"):
        words.append(f"{record['samples_per_s']:,.0f} samples/s")
    if record.get("left_s") is not None:
        words.append(f"{clock(record['left_s'])} left")
    return "  ".join(words)


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, (int, float)) else str(value)
