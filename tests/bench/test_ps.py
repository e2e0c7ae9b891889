"""`shoal bench ps` by processes: what it prints, not how fast it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scripts import json_of, shoal


@pytest.mark.whole
def test_shoal_alone_is_measured(tmp_path: Path) -> None:
    words = ["bench", "ps", "--against", "", "--size", "100KB", "--rounds", "2", "--json"]
    found: Any = json_of(shoal(*words, cwd=tmp_path))
    assert (found["workers"], found["bytes"], found["rows"]) == (2, 100_000, 1000)
    (alone,) = found["results"]
    assert alone["peer"] is None and set(alone["dense"]) == {"shoal"}
    rows_a_second = alone["rows_per_s"]["shoal"]
    assert rows_a_second == pytest.approx(1e6 / alone["sparse"]["shoal"]["median_ms"])


@pytest.mark.whole
def test_an_unknown_peer_is_refused(tmp_path: Path) -> None:
    found = shoal("bench", "ps", "--against", "horovod", cwd=tmp_path)
    assert found.returncode == 2
    assert found.stderr == "shoal: --against takes ray, rpc, not horovod\n"
