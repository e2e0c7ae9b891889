"""`python -m benchmarks ps --replicas`: what is compared, the table and the picture."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.__main__ import ps
from benchmarks.ps_replicas_report import ReplicaBench, draw, table_of
from shoal.errors import BadInput


def bench(replicas: str, consistency: str = "strong,eventual") -> ReplicaBench:
    return ReplicaBench(replicas, consistency, "1MB", 4, 2)


def result(replicas: int, consistency: str, ms: float, gap_s: float | None) -> dict[str, Any]:
    push = {"median_ms": ms, "low_ms": ms / 2, "high_ms": ms * 2}
    counts = {"largest_lag": 7, "acknowledged": 30, "refused": 1, "undone": 2}
    case = {"replicas": replicas, "consistency": consistency}
    return {**case, "push": push, **counts, "without_service_s": gap_s}


DOCUMENT = {
    "workers": 2,
    "bytes": 1_000_000,
    "pushes": 4,
    "results": [result(1, "strong", 2.0, None), result(3, "eventual", 5.0, 0.61)],
}


def test_what_replicas_alone_have_is_refused_without_them() -> None:
    with pytest.raises(BadInput, match="add --replicas 1,2,3"):
        ps(consistency="weak")
    with pytest.raises(BadInput, match="add --replicas 1,2,3"):
        ps(svg=Path("replicas.svg"))


def test_a_single_copy_is_measured_once() -> None:
    assert bench("1,2").cases() == [(1, "strong"), (2, "strong"), (2, "eventual")]
    assert bench("3,3", "eventual").cases() == [(3, "eventual")]


@pytest.mark.parametrize(
    ("replicas", "consistency"), [("99", "strong"), ("1,x", "strong"), ("2", "weak")]
)
def test_options_are_checked(replicas: str, consistency: str) -> None:
    with pytest.raises(BadInput, match=r"--(replicas|consistency) takes"):
        bench(replicas, consistency).cases()


def test_the_table_has_the_cost_against_one_copy_and_the_time_without_service() -> None:
    out = io.StringIO()
    Console(file=out, width=140).print(table_of(DOCUMENT))
    lines = out.getvalue().splitlines()
    (row,) = [line for line in lines if "eventual" in line]
    assert row.split() == ["3", "eventual", "5", "2.50×", "7", "1", "2", "0.61", "s"]
    assert "to the end" in out.getvalue()


def test_the_picture_has_a_bar_for_each_figure() -> None:
    picture = ET.fromstring(draw(DOCUMENT))
    bars = [e for e in picture.iter("{http://www.w3.org/2000/svg}rect") if e.get("x")]
    assert len(bars) == 3
    texts = [e.text or "" for e in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert any("2 acknowledged pushes undone" in text for text in texts)
