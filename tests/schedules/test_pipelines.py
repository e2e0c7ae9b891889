from __future__ import annotations

import pytest

from shoal.errors import BadInput
from shoal.schedules.pipelines.catalog import build, schedules
from shoal.strategy.split_terms import Pp


def words(name: str, stages: int, microbatches: int, chunks: int | None = None) -> list[str]:
    return [" ".join(map(str, one)) for one in build(name, stages, microbatches, chunks).actions]


def test_the_catalog_has_the_names_of_the_strategy_notation() -> None:
    assert [Pp(2, schedule=name).schedule for name in schedules()] == schedules()


def test_two_stages_and_three_microbatches_are_this() -> None:
    assert words("inter-op", 2, 3) == ["F0 B0 F1 B1 F2 B2", "F0 B0 F1 B1 F2 B2"]
    assert words("gpipe", 2, 3) == ["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"]
    assert words("1f1b", 2, 3) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert words("zb-h1", 2, 3) == ["F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]
    assert words("zb-h2", 2, 3) == ["F0 F1 F2 I0 W0 I1 W1 I2 W2", "F0 I0 F1 I1 F2 I2 W0 W1 W2"]


def test_two_stages_of_two_chunks_are_this() -> None:
    assert words("bfs", 2, 2, 2) == 2 * ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"]
    assert words("interleaved", 2, 4, 2) == [
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ]


def test_interleaved_makes_larger_groups_where_stages_do_not_divide_microbatches() -> None:
    assert words("interleaved", 2, 5, 2)[1].split()[:7] == [
        "F0", "F1", "F2", "F0.1", "B0.1", "F1.1", "B1.1",
    ]  # fmt: skip
    assert words("interleaved", 4, 2, 2) == 2 * ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"] + [
        "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1",
    ]


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (("1f1b", 0, 4), "at least one stage, not 0"),
        (("1f1b", 4, 0), "at least one micro-batch, not 0"),
        (("1f1b", 4, 4, 2), "1f1b has one chunk a stage, not 2: interleaved and bfs"),
        (("gpip", 4, 4), "did you mean 'gpipe'"),
    ],
)
def test_what_is_no_pipeline_is_refused(sizes: tuple[str, int, int], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        build(*sizes)
