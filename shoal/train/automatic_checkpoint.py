"""Checkpoints that a job saves and goes on from by itself (SHOAL_CHECKPOINT, `--checkpoint`).

A script that is started again, by Slurm, torchrun or by hand, continues without a line for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shoal.runtime.config import CheckpointConfig
from shoal.train import checkpoint
from shoal.train.checkpoint_folder import read_manifest_bytes

FindCheckpoint = Callable[[], checkpoint.Checkpoint | None]


class AutomaticCheckpoint:
    """When a job saves by itself, and where. `is_on` says whether it does at present."""

    def __init__(self, config: CheckpointConfig, is_on: Callable[[], bool]):
        self._config = config
        self._is_on = is_on
        self.saved_at = 0  # steps

    @property
    def folder(self) -> Path | None:
        """None where nothing is saved: it was not asked for, or this is a trial run."""
        return self._config.folder if self._is_on() else None

    def is_due(self, steps: int) -> bool:
        """Whether a multiple of `every` was reached since the last checkpoint."""
        every = self._config.every
        return self.folder is not None and steps // every > self.saved_at // every

    def read(self) -> checkpoint.Checkpoint | None:
        """The checkpoint of the folder; None if there is none yet."""
        folder = self.folder
        if folder is None or read_manifest_bytes(folder) is None:
            return None
        return checkpoint.read(folder)
