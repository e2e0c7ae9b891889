"""What benchmarks compute from what they measure, and the tables that they print."""

from __future__ import annotations

import io
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import ps_replicas_report
from benchmarks.pipeline_idle import Slow, compare, idle_fraction
from benchmarks.ps_replicas_report import ReplicaBench
from benchmarks.rows import link_bytes, zipf_batches
from benchmarks.rows_report import is_bound, table_of, with_speedups
from shoal.replica.pipeline.split_backward import SplitBackward
from shoal.runtime.trace import Span


def test_a_single_copy_of_a_server_is_measured_once() -> None:
    def cases(replicas: str, consistency: str) -> list[tuple[int, str]]:
        return ReplicaBench(replicas, consistency, "1MB", 4, 2).cases()

    assert cases("1,2", "strong,eventual") == [(1, "strong"), (2, "strong"), (2, "eventual")]
    assert cases("3,3", "eventual") == [(3, "eventual")]


def test_the_table_has_the_cost_against_one_copy_and_the_time_without_service() -> None:
    def result(replicas: int, consistency: str, ms: float, gap_s: float | None) -> dict[str, Any]:
        push = {"median_ms": ms, "low_ms": ms / 2, "high_ms": ms * 2}
        counts = {"largest_lag": 7, "acknowledged": 30, "refused": 1, "undone": 2}
        case = {"replicas": replicas, "consistency": consistency}
        slow = {"push_slow_copy": {"median_ms": 9 * ms}}
        return {**case, "push": push, **slow, **counts, "without_service_s": gap_s}

    results = [result(1, "strong", 2.0, None), result(3, "eventual", 5.0, 0.61)]
    out = io.StringIO()
    document = {"workers": 2, "bytes": 1_000_000, "pushes": 4, "results": results}
    Console(file=out, width=80).print(ps_replicas_report.table_of(document))
    (row,) = [line for line in out.getvalue().splitlines() if "eventual" in line]
    assert " ".join(row.split()) == "3 eventual 3 MB 5 2.50× 45 7 1 2 0.61 s"
    assert "to end" in out.getvalue()


def test_batches_of_rows_have_each_id_once_and_low_ids_often() -> None:
    batches = zipf_batches(1000, 1.1, 50, seed=0)
    assert all(torch.equal(batch, torch.unique(batch)) for batch in batches)
    counts = Counter(int(row) for batch in batches for row in batch)
    assert max(counts) < 1000 and counts[0] > 0.9 * len(batches)
    assert sum(counts[row] for row in range(250)) > 0.7 * counts.total()


def test_speeds_and_links_are_compared_with_asking_owners() -> None:
    def figures(speed: float, largest: float) -> dict[str, Any]:
        return {
            "pulls_per_s": [speed, speed],
            "busiest_server_pulls_per_s": [2 * speed, 4 * speed],
            **{name: [1.0, 2.0] for name in ("worker_cpu_ms", "server_cpu_ms")},
            "max_over_mean_cpu": [largest, largest],
            "busiest_link_bytes": [100 * largest, 100 * largest],
            **{"max_over_mean_load": largest, "load": [1], "copied_rows": 7},
        }

    ways = {"owners": figures(10, 3.0), "copies": figures(20, 1.1), "cache": figures(30, 1.2)}
    about = {"rows": 9, "servers": 4, "workers": 2, "exponent": 1.1, "cache": 4}
    about |= {"link_bytes_per_s": 3600.0, "rows_per_pull": 5.0, "hit_rate": 0.5}
    found = with_speedups({**about, "ways": ways})
    ways = found["ways"]
    assert [way["speedup"] for way in ways.values()] == [1.0, 2.0, 3.0]
    assert ways["copies"]["busiest_server_speedup"] == 2.0
    assert ways["cache"]["median_busiest_server_pulls_per_s"] == 90.0
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


def test_idle_is_what_is_not_computing_from_the_first_begin_to_the_last_end() -> None:
    def span(kind: str, start: int, end: int) -> Span:
        return Span(kind, start, end, "main", "")

    first = [span("forward", 10, 20), span("wait", 20, 40), span("backward", 40, 50)]
    second = [span("wait", 0, 20), span("forward", 20, 30), span("backward", 30, 40)]
    assert idle_fraction([first, second]) == pytest.approx(1 - 40 / 80)


def test_a_slow_layer_sleeps_once_in_each_half(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("benchmarks.pipeline_idle.time.sleep", slept.append)
    layer = Slow(0.5)
    out = layer(torch.ones(2, 4))
    assert sum(slept) == 0.5
    split = SplitBackward([out.sum()], [None])
    split.input_grads([])
    assert sum(slept) == 1.0
    assert len(split.weight_grads()) == len(list(layer.parameters()))
    assert sum(slept) == 1.5


def test_a_pipeline_is_traced_and_simulated() -> None:
    found = compare("gpipe", stages=2, microbatches=2, action_s=0.001, steps=1)
    assert found["simulated_idle"] == pytest.approx(1 / 3)
    assert 0 < found["traced_idle"] < 1
