"""A version that was replaced has no name any more; its space follows, and forks do not keep it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.runtime import checkpoint_folders
from shoal.runtime.checkpoint_folders import removals
from shoal.train.checkpoints import files
from shoal.train.checkpoints.files import Checkpoint
from tests.chaos.save_kills import fork


def save(folder: Path, steps: int) -> None:
    files.write(
        folder, Checkpoint({"a": torch.full((1000,), steps)}, {}, {"steps": steps, "batches": 0})
    )


def removed_files(folder: Path) -> list[str]:
    """Those that this process holds open."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # that of the listing
    return [link for link in links if link.startswith(str(folder)) and link.endswith("(deleted)")]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Removed files are closed when the event is set."""
    may_close = threading.Event()
    close_removed = checkpoint_folders._close_removed

    def wait_and_close() -> None:
        assert may_close.wait(60)
        close_removed()

    monkeypatch.setattr(checkpoint_folders, "_close_removed", wait_and_close)
    yield may_close
    may_close.set()


def test_a_save_does_not_wait_for_the_space_of_the_one_before(
    tmp_path: Path, slow: threading.Event
) -> None:
    for steps in (1, 2):
        save(tmp_path, steps)
    assert len(list(tmp_path.iterdir())) == 3
    assert len(removed_files(tmp_path)) == 2
    slow.set()
    removals.join()
    assert not removed_files(tmp_path)


def test_the_next_save_waits_for_it(tmp_path: Path, slow: threading.Event) -> None:
    for steps in (1, 2):
        save(tmp_path, steps)
    third = threading.Thread(target=save, args=(tmp_path, 3))
    third.start()
    third.join(0.2)
    assert files.read(tmp_path).document["steps"] == 2
    slow.set()
    third.join()
    assert files.read(tmp_path).document["steps"] == 3


def test_a_fork_does_not_hold_them(tmp_path: Path, slow: threading.Event) -> None:
    def body() -> None:
        assert not removed_files(tmp_path)
        save(tmp_path, 3)  # it waits for no thread of its parent

    for steps in (1, 2):
        save(tmp_path, steps)
    _, status = os.waitpid(fork(body), 0)
    assert status == 0
    assert len(removed_files(tmp_path)) == 2
    slow.set()
