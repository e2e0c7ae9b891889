from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import zygote
from tests.launch.helpers import Rope


@pytest.fixture
def rope(tmp_path: Path) -> Iterator[Rope]:
    rope = Rope(tmp_path)
    yield rope
    rope.close()


@pytest.fixture(autouse=True)
def no_open_files_left() -> Iterator[None]:
    zygote()  # which stays, with its socket
    before = set(os.listdir("/proc/self/fd"))
    yield
    after = set(os.listdir("/proc/self/fd"))
    assert len(after) <= len(before), f"open files left behind: {sorted(after - before)}"
