from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.forked import zygote
from tests.launch.helpers import Rope


@pytest.fixture
def rope(tmp_path: Path) -> Iterator[Rope]:
    rope = Rope(tmp_path)
    yield rope
    rope.close()


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For temporary files: runs of other tests, and of the user, are not seen.

    Its path is short enough for sockets.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture(autouse=True)
def no_open_files_left() -> Iterator[None]:
    zygote()  # which stays, with its socket
    before = _open_files()
    yield
    left = sorted(set(_open_files().items()) - set(before.items()))
    assert len(_open_files()) <= len(before), f"open files left behind: {left}"


def _open_files() -> dict[str, str]:
    """By descriptor; without those of the CUDA driver, which stay once it has been asked."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return {number: name for number, name in found.items() if "nvidia" not in name}
