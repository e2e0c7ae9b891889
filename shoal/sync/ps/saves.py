"""The worker's side of periodic server checkpoints: when to ask for one, and its own part.

Every worker asks with the push of each `every`-th step. The servers save when the step of that
push is applied, and the worker whose push has completed the step writes the part of the workers.
So all files of a checkpoint are of the same step. Before that push a worker gives the servers what
compression has not sent yet; they save it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shoal.errors import BadInput
from shoal.runtime.checkpoint_folders import WORKER_FILE, version_of
from shoal.runtime.config import ServerCheckpointConfig
from shoal.server.process.shard_file import BackgroundWriter, write_tensors

_PATIENCE = 4  # times `every` steps, for a checkpoint that is being written


class ServerSaves:
    """Checkpoints that one worker asks the servers of one model for."""

    def __init__(self, config: ServerCheckpointConfig, model: int, rank: int):
        if config.folder is None:
            raise BadInput("periodic checkpoints of servers need a folder")
        self.folder = config.folder
        self.model = model
        self.accepted: int | None = None  # this worker writes the part of the workers of it
        self._every = config.every
        self._latest = 0  # that was asked for
        self._writer = BackgroundWriter(f"worker {rank}", self.folder)

    def may_ask(self, number: int) -> bool:
        """Whether a worker may ask for a checkpoint of step `number`, this one or another."""
        return number % self._every == 0

    def due(self, number: int) -> int | None:
        """The checkpoint to ask for with the push that completes step `number`."""
        if not self.may_ask(number):
            return None
        is_awaited = self._latest > number - _PATIENCE * self._every
        if self._latest and is_awaited and self._is_being_written():
            return None  # the disk is slower than training: this one is left out
        self._latest = number
        return number

    def _is_being_written(self) -> bool:
        latest = version_of(self.folder, self._latest, self.model)
        return self._writer.is_busy or (latest.path.exists() and not latest.is_complete)

    def write(self, number: int, describe: Callable[[], tuple[dict[str, Tensor], Any]]) -> None:
        """Write the part of the workers in the background: what `describe()` returns now."""
        if self._writer.is_busy:
            return
        tensors, document = describe()
        version = version_of(self.folder, number, self.model)

        self._writer.start(
            lambda: version.write(WORKER_FILE, lambda file: write_tensors(file, tensors, document))
        )

    def take_accepted(self) -> int | None:
        accepted = self.accepted
        self.accepted = None
        return accepted

    def close(self) -> None:
        self._writer.close()
