"""The benchmark of hot rows: its batches and its figures."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from shoal.bench.rows import zipf_batches
from shoal.commands.bench_rows import RowsBench, table_of, with_speedups
from shoal.errors import BadInput


def test_batches_have_each_id_once_and_low_ids_often() -> None:
    batches = zipf_batches(1000, 1.1, 50, seed=0)
    assert all(torch.equal(batch, torch.unique(batch)) for batch in batches)
    counts = Counter(int(row) for batch in batches for row in batch)
    assert max(counts) < 1000 and counts[0] > 0.9 * len(batches)
    assert sum(counts[row] for row in range(250)) > 0.7 * counts.total()


def document() -> dict[str, Any]:
    def figures(speed: float, largest: float) -> dict[str, Any]:
        return {
            "pulls_per_s": [speed, speed],
            "busiest_server_pulls_per_s": [2 * speed, 4 * speed],
            "max_over_mean_cpu": [largest, largest],
            "max_over_mean_load": largest,
            "load": [1],
            "copied_rows": 7,
        }

    ways = {"owners": figures(10, 3.0), "copies": figures(20, 1.1), "cache": figures(30, 1.2)}
    about = {"rows": 9, "servers": 4, "workers": 2, "exponent": 1.1, "cache": 4}
    return with_speedups({**about, "rows_per_pull": 5.0, "hit_rate": 0.5, "ways": ways})


def test_speeds_are_compared_with_asking_owners() -> None:
    ways = document()["ways"]
    assert [way["speedup"] for way in ways.values()] == [1.0, 2.0, 3.0]
    assert ways["copies"]["busiest_server_speedup"] == 2.0
    assert ways["cache"]["median_busiest_server_pulls_per_s"] == 90.0
    assert table_of(document()).row_count == 3


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"share": 1.0}, {"exponent": -1.0}])
def test_bad_options_are_refused(wrong: dict[str, float]) -> None:
    options: dict[str, Any] = {"exponent": 1.1, "share": 0.1, **wrong}
    with pytest.raises(BadInput, match=f"--{next(iter(wrong))}"):
        RowsBench(9, 1, 1, 1, 2, 1, 1, **options).check()
