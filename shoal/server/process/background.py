"""Files of checkpoints that are written beside training: one at a time, and a failure is a line."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from shoal.runtime.checkpoint_folders import (
    complete_versions,
    in_words,
    shard_name,
    version_of,
)
from shoal.server.model.served_model import ServedModel
from shoal.server.model.snapshot import saved_state
from shoal.server.process.shard_file import write_tensors

_CLOSE_S = 60.0


def _print(sentence: str) -> None:
    print(f"shoal: {sentence}", file=sys.stderr, flush=True)


class BackgroundWriter:
    """Runs one action at a time in a thread. Of failures in a row only the first is reported."""

    def __init__(self, what: str, folder: Path, say: Callable[[str], None] = _print):
        self._what = what
        self._folder = folder
        self._say = say
        self._thread: threading.Thread | None = None
        self._has_told = False

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, action: Callable[[], None]) -> None:
        """Only while it is not busy."""
        name = "shoal-checkpoint"
        self._thread = threading.Thread(target=self._run, args=(action,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for what is being written."""
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._has_told = False
        except (OSError, SafetensorError, MemoryError, RuntimeError) as error:
            if not self._has_told:
                self._has_told = True
                complete = complete_versions(self._folder)
                step = f"the checkpoint of step {complete[0].number} stays" if complete else ""
                self._say(
                    f"{self._what} cannot write its checkpoint to {self._folder}: "
                    f"{in_words(error)}; training goes on, and {step or 'there is none before it'}"
                )


class ShardSaver:
    """Saves the models of one server."""

    def __init__(self, folder: Path, server: str, say: Callable[[str], None] = _print):
        self._folder = folder
        self._writer = BackgroundWriter(server, folder, say)
        self._lock = threading.Lock()

    def save(
        self, model_id: int, model: ServedModel, number: int, stays: Callable[[], bool]
    ) -> None:
        """Copy the state, under its lock, and write it later; leaves it out if it is behind.

        `stays()` waits until no loss of a server undoes what was copied; False if one has.
        """
        version = version_of(self._folder, number, model_id)
        name = shard_name(model.spec.index, model.spec.servers)
        with self._lock:
            if self._writer.is_busy:
                return
            document, copies = saved_state(model, number)
            tensors = dict(zip(document.tensor_names(), copies, strict=True))

            def write() -> None:
                if (version.path / name).exists() or not stays():  # another copy's
                    return
                version.write(name, lambda file: write_tensors(file, tensors, document))

            self._writer.start(write)

    def close(self) -> None:
        self._writer.close()
