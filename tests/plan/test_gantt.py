from __future__ import annotations

import io

import pytest
from rich.console import Console

from shoal.errors import BadInput
from shoal.plan.gantt import draw, gantt
from shoal.plan.timeline import Times, simulate
from shoal.schedules.pipelines.catalog import build, schedules
from shoal.schedules.pipelines.proof import prove

# F, I and W take 1, and so B takes 2; of two chunks each takes half of that
INTER_OP = """
F0 ·  ·  ·  ·  ·  ·  ·  ·  ·  B0─── F1 ·  ·  ·  ·  ·  ·  ·  ·  ·  B1─── F2 ·  ·  ·  ·  ·  ·  ·  ·  ·  B2─── F3 ·  ·  ·  ·  ·  ·  ·  ·  ·  B3───
·  F0 ·  ·  ·  ·  ·  ·  B0─── ·  ·  ·  F1 ·  ·  ·  ·  ·  ·  B1─── ·  ·  ·  F2 ·  ·  ·  ·  ·  ·  B2─── ·  ·  ·  F3 ·  ·  ·  ·  ·  ·  B3─── ·  ·
·  ·  F0 ·  ·  ·  B0─── ·  ·  ·  ·  ·  ·  F1 ·  ·  ·  B1─── ·  ·  ·  ·  ·  ·  F2 ·  ·  ·  B2─── ·  ·  ·  ·  ·  ·  F3 ·  ·  ·  B3─── ·  ·  ·  ·
·  ·  ·  F0 B0─── ·  ·  ·  ·  ·  ·  ·  ·  ·  F1 B1─── ·  ·  ·  ·  ·  ·  ·  ·  ·  F2 B2─── ·  ·  ·  ·  ·  ·  ·  ·  ·  F3 B3─── ·  ·  ·  ·  ·  ·
"""  # noqa: E501
GPIPE = """
F0 F1 F2 F3 F4 F5 F6 F7 ·  ·  ·  ·  ·  ·  ·  ·  ·  B0─── B1─── B2─── B3─── B4─── B5─── B6─── B7───
·  F0 F1 F2 F3 F4 F5 F6 F7 ·  ·  ·  ·  ·  ·  B0─── B1─── B2─── B3─── B4─── B5─── B6─── B7─── ·  ·
·  ·  F0 F1 F2 F3 F4 F5 F6 F7 ·  ·  ·  B0─── B1─── B2─── B3─── B4─── B5─── B6─── B7─── ·  ·  ·  ·
·  ·  ·  F0 F1 F2 F3 F4 F5 F6 F7 B0─── B1─── B2─── B3─── B4─── B5─── B6─── B7─── ·  ·  ·  ·  ·  ·
"""
ONE_F_ONE_B = """
F0 F1 F2 F3 ·  ·  ·  ·  ·  ·  B0─── F4 B1─── F5 B2─── F6 B3─── F7 B4─── ·  B5─── ·  B6─── ·  B7───
·  F0 F1 F2 ·  ·  ·  ·  B0─── F3 B1─── F4 B2─── F5 B3─── F6 B4─── F7 B5─── ·  B6─── ·  B7─── ·  ·
·  ·  F0 F1 ·  ·  B0─── F2 B1─── F3 B2─── F4 B3─── F5 B4─── F6 B5─── F7 B6─── ·  B7─── ·  ·  ·  ·
·  ·  ·  F0 B0─── F1 B1─── F2 B2─── F3 B3─── F4 B4─── F5 B5─── F6 B6─── F7 B7─── ·  ·  ·  ·  ·  ·
"""
INTERLEAVED = """
F0   F1   F2   F3   F0.1 F1.1 F2.1 F3.1 ·    ·    ·    ·    ·    ·    B0.1───── ·    B1.1───── ·    B2.1───── ·    B3.1───── B0─────── B1─────── B2─────── B3───────
·    F0   F1   F2   F3   F0.1 F1.1 F2.1 F3.1 ·    ·    ·    B0.1───── ·    B1.1───── ·    B2.1───── ·    B3.1───── B0─────── B1─────── B2─────── B3─────── ·    ·
·    ·    F0   F1   F2   F3   F0.1 F1.1 F2.1 ·    B0.1───── F3.1 B1.1───── ·    B2.1───── ·    B3.1───── B0─────── B1─────── B2─────── B3─────── ·    ·    ·    ·
·    ·    ·    F0   F1   F2   F3   F0.1 B0.1───── F1.1 B1.1───── F2.1 B2.1───── F3.1 B3.1───── B0─────── B1─────── B2─────── B3─────── ·    ·    ·    ·    ·    ·
"""  # noqa: E501
ZB_H1 = """
F0 F1 F2 F3 ·  ·  ·  I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
·  F0 F1 F2 ·  ·  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
·  ·  F0 F1 ·  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
·  ·  ·  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
"""
ZB_H2 = """
F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7 ·  ·  ·
·  F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 F7 I3 W1 I4 W2 I5 W3 I6 W4 I7 W5 W6 W7 ·  ·
·  ·  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 F7 I5 W1 I6 W2 I7 W3 W4 W5 W6 W7 ·
·  ·  ·  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7
"""
BFS = """
F0   F1   F2   F3   F0.1 F1.1 F2.1 F3.1 ·    ·    ·    ·    ·    ·    ·    ·    ·    B0.1───── B1.1───── B2.1───── B3.1───── B0─────── B1─────── B2─────── B3───────
·    F0   F1   F2   F3   F0.1 F1.1 F2.1 F3.1 ·    ·    ·    ·    ·    ·    B0.1───── B1.1───── B2.1───── B3.1───── B0─────── B1─────── B2─────── B3─────── ·    ·
·    ·    F0   F1   F2   F3   F0.1 F1.1 F2.1 F3.1 ·    ·    ·    B0.1───── B1.1───── B2.1───── B3.1───── B0─────── B1─────── B2─────── B3─────── ·    ·    ·    ·
·    ·    ·    F0   F1   F2   F3   F0.1 F1.1 F2.1 F3.1 B0.1───── B1.1───── B2.1───── B3.1───── B0─────── B1─────── B2─────── B3─────── ·    ·    ·    ·    ·    ·
"""  # noqa: E501


@pytest.mark.parametrize(
    ("name", "microbatches", "picture"),
    [
        ("inter-op", 4, INTER_OP),
        ("gpipe", 8, GPIPE),
        ("1f1b", 8, ONE_F_ONE_B),
        ("interleaved", 4, INTERLEAVED),
        ("zb-h1", 8, ZB_H1),
        ("zb-h2", 8, ZB_H2),
        ("bfs", 4, BFS),
    ],
)
def test_the_chart_of_four_stages_is_this(name: str, microbatches: int, picture: str) -> None:
    assert gantt(simulate(build(name, 4, microbatches))) == picture.strip("\n")


def shown(name: str, stages: int, microbatches: int, times: Times, width: int = 120) -> str:
    pipeline = build(name, stages, microbatches)
    out = io.StringIO()
    draw(simulate(pipeline, times), prove(pipeline), Console(file=out, width=width))
    return out.getvalue()


def test_a_transfer_and_unequal_times_have_their_columns() -> None:
    assert gantt(simulate(build("1f1b", 2, 2), Times(2, 2, 1, transfer=1))) == (
        "F0─── F1─── ·  ·  ·  ·  ·  B0────── ·  ·  B1──────\n"
        "·  ·  ·  F0─── B0────── F1─── B1────── ·  ·  ·  ·"
    )


def test_what_does_not_fit_into_columns_is_rounded_and_says_so() -> None:
    text = shown("1f1b", 2, 3, Times(1.013, 0.987, 1.1))
    assert "rounded to columns of 1.013" in text
    assert "rounded" not in shown("1f1b", 2, 3, Times(1e-6, 2e-6, 3e-6, 1e-6))


def test_nothing_wider_than_the_console_is_printed() -> None:
    for name in schedules():
        wide = shown(name, 4, 8, Times(), width=70).split("\n\n")[0].splitlines()
        assert max(map(len, wide)) <= 70
        assert all(line == line.rstrip() for line in wide if line.startswith("stage"))


def test_the_bands_of_a_narrow_console_join_to_the_whole_chart() -> None:
    lines = shown("1f1b", 2, 6, Times(), width=40).splitlines()
    for stage, whole in enumerate(gantt(simulate(build("1f1b", 2, 6))).splitlines()):
        bands = [line[9:] for line in lines if line.startswith(f"stage {stage}")]
        assert "".join(band.ljust(30) for band in bands).rstrip() == whole


def test_the_costs_stand_below() -> None:
    text = shown("zb-h1", 4, 8, Times())
    assert "time     27\n" in text
    assert "bubble   11.11% of the longest stage" in text
    assert "holds    at most 4 micro-batches, of which 1 2 3 4 only wait for W" in text
    assert (
        "every F before its I before its W, each once; never hangs with room for 1 message" in text
    )
    assert "holds    at most 4 3 2 1 micro-batches\n" in shown("1f1b", 4, 8, Times())


def test_what_is_unreadable_is_refused() -> None:
    with pytest.raises(BadInput, match="65 stages is unreadable"):
        gantt(simulate(build("gpipe", 65, 1)))
    with pytest.raises(BadInput, match="columns long, too long to draw"):
        gantt(simulate(build("gpipe", 2, 2), Times(forward=1e-6)))
