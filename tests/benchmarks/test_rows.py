"""The benchmark of hot rows: its batches and its figures."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.rows import link_bytes, zipf_batches
from benchmarks.rows_report import RowsBench, is_bound, link_rate, table_of, with_speedups
from shoal.errors import BadInput


def test_batches_have_each_id_once_and_low_ids_often() -> None:
    batches = zipf_batches(1000, 1.1, 50, seed=0)
    assert all(torch.equal(batch, torch.unique(batch)) for batch in batches)
    counts = Counter(int(row) for batch in batches for row in batch)
    assert max(counts) < 1000 and counts[0] > 0.9 * len(batches)
    assert sum(counts[row] for row in range(250)) > 0.7 * counts.total()


def document(rate: float | None = None) -> dict[str, Any]:
    def figures(speed: float, largest: float) -> dict[str, Any]:
        return {
            "pulls_per_s": [speed, speed],
            "busiest_server_pulls_per_s": [2 * speed, 4 * speed],
            "max_over_mean_cpu": [largest, largest],
            "worker_cpu_ms": [1.0, 2.0],
            "server_cpu_ms": [1.0, 2.0],
            "busiest_link_bytes": [100 * largest, 100 * largest],
            "max_over_mean_load": largest,
            "load": [1],
            "copied_rows": 7,
        }

    ways = {"owners": figures(10, 3.0), "copies": figures(20, 1.1), "cache": figures(30, 1.2)}
    about = {"rows": 9, "servers": 4, "workers": 2, "exponent": 1.1, "cache": 4}
    return with_speedups(
        {**about, "link_bytes_per_s": rate, "rows_per_pull": 5.0, "hit_rate": 0.5, "ways": ways}
    )


def test_speeds_are_compared_with_asking_owners() -> None:
    ways = document()["ways"]
    assert [way["speedup"] for way in ways.values()] == [1.0, 2.0, 3.0]
    assert ways["copies"]["busiest_server_speedup"] == 2.0
    assert ways["cache"]["median_busiest_server_pulls_per_s"] == 90.0
    assert table_of(document()).row_count == 3


def test_bytes_of_the_busiest_link_predict_the_speed_of_several_hosts() -> None:
    found = document(rate=3600.0)
    ways = found["ways"]
    assert [way["predicted_speedup"] for way in ways.values()] == pytest.approx([1, 3 / 1.1, 2.5])
    assert [way["link_use"] for way in ways.values()] == pytest.approx([3 / 3.6, 2.2 / 3.6, 1.0])
    assert [is_bound(found, way) for way in ways] == [True, False, True]
    assert table_of(found).row_count == 3


def test_servers_of_the_own_host_are_not_reached_over_a_link() -> None:
    def link(address: str, sent: int, received: int) -> Any:
        route = SimpleNamespace(address=address, is_unix=address.startswith("unix:"))
        return SimpleNamespace(route=route, sent_bytes=sent, received_bytes=received)

    links = [
        *(link("unix:/run/0", 1, 10), link("tcp:h0:5", 2, 20)),
        *(link("tcp:h1:5", 3, 30), link("tcp:h1:6", 4, 40), link("tcp:h2:5", 5, 50)),
    ]
    assert link_bytes("h0", links) == {
        **{"h0 out": 12, "h1 in": 7, "h2 in": 5},
        **{"h1 out": 70, "h2 out": 50, "h0 in": 120},
    }


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"exponent": -1.0}])
def test_bad_options_are_refused(wrong: dict[str, float]) -> None:
    options: dict[str, Any] = {"exponent": 1.1, "share": 0.1, **wrong}
    with pytest.raises(BadInput, match=f"--{next(iter(wrong))}"):
        RowsBench(9, 1, 1, 1, 2, 1, 1, **options).check()
    with pytest.raises(BadInput, match="--on takes lab"):
        link_rate("ray")
