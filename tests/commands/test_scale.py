"""`shoal scale`: measured up to the cores of the machine, predicted beyond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.commands import scale
from shoal.commands.scale import ScaleRow
from shoal.errors import BadInput
from shoal.observe.comparison import RunOutcome
from tests.scripts import PLAIN, json_of, shoal


@pytest.mark.parametrize(
    ("texts", "counts", "found"),
    [
        (["ddp"], [1, 2, 4], [("ddp", 2), ("ddp", 4)]),
        (["ddp", "ddp()", "single"], [1, 2], [("ddp", 2)]),
        (["tp(2)"], [1, 2, 3], [("tp(2)", 2)]),  # those numbers that it can be run on
    ],
)
def test_what_is_measured_or_predicted(texts: Any, counts: Any, found: Any) -> None:
    assert scale._asked(texts, counts) == found


@pytest.mark.parametrize(("texts", "counts"), [(["ddp"], [1]), (["tp(3)"], [1, 2]), (["x"], [2])])
def test_what_makes_no_sense_is_refused_before_anything_starts(texts: Any, counts: Any) -> None:
    with pytest.raises(BadInput):
        scale._asked(texts, counts)


def test_a_speed_up_that_is_no_verdict_has_no_efficiency_and_no_point() -> None:
    sure = RunOutcome("ddp", 2, steps=30, steps_per_s=20.0, speed_up=1.5, speed_ups=(1.4, 1.6))
    unsure = RunOutcome("ddp", 4, steps=30, steps_per_s=20.0, speed_ups=(1.0, 3.0))
    rows = [scale._measured(one, {}) for one in (sure, unsure)]
    assert [row.efficiency for row in rows] == [0.75, None]
    assert [(row.low, row.high) for row in rows] == [(1.4, 1.6), (1.0, 3.0)]
    assert scale._lines(rows, []) == {"ddp": [(1, 1.0), (2, 1.5)], "~ideal": [(1, 1.0), (2, 2)]}
    assert "no verdict" in str(rows[1].why)


@pytest.mark.parametrize(
    ("gpus", "device", "found"),
    [
        (0, None, (3, "core")),
        (2, None, (2, "GPU")),
        (2, "cpu", (3, "core")),
        (2, "cuda:1", (1, "GPU")),
    ],
)
def test_workers_are_measured_up_to_the_devices_that_they_use(
    gpus: int, device: str | None, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(scale, "cores", lambda: 3)
    assert scale._places(device) == found


@pytest.mark.whole
def test_predicted_rows_are_marked_and_end_at_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    asked = [("ddp", 2), ("ddp", 16), ("ddp", 32)]
    found, notes = scale._predicted("train.py", None, "dgx-a100", asked)
    assert list(found) == asked[:2]
    assert {row.how for row in found.values()} == {"predicted"}
    assert all(row.low <= row.speed_up <= row.high for row in found.values())  # type: ignore
    assert notes[1] == "ddp is not predicted from 32 workers on: its batch has 20 samples"


def test_columns_fit_80(capsys: pytest.CaptureFixture[str]) -> None:
    numbers: Any = [0.9999, 0.9999, 999.99, 123.45, 999.99, 0.99, 0.99, 999.99]
    rows = [ScaleRow("ddp", 65_536, "predicted", *numbers)]
    scale._show("digits", rows, {("ddp", 65_536): rows[0]}, [], None, False)
    out = capsys.readouterr().out
    assert max(map(len, map(str.rstrip, out.splitlines()))) <= 80
    assert "123-1,000×" in out


@pytest.mark.whole
def test_a_script_is_measured_and_predicted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN.replace("epochs=2", "epochs=9"))
    words = ["scale", "-n", "1,2,4", "--processes", "2", "--svg", "s.svg", "--json", "train.py"]
    rows: Any = json_of(shoal(*words, cwd=tmp_path))["rows"]
    found = [(row["strategy"], row["workers"], row["how"]) for row in rows]
    measured = [("single", 1, "measured"), ("ddp", 2, "measured")]
    assert found == [*measured, ("ddp", 4, "predicted")]
    assert rows[1]["step_s"] > 0
    assert rows[1]["cpu_s_per_step"] > 0
    assert 0 <= rows[1]["communication"] + rows[1]["waiting"] < 1
    assert "ideal" in (tmp_path / "s.svg").read_text()
