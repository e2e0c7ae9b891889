"""`shoal predict` and `shoal plan` from sizes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.cluster.units import parse_s_per_byte
from shoal.errors import BadInput

SMALL = ["--gpt", "layers=4,hidden=1024,heads=4,sequence=512", "--cluster", "dgx-a100"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    shown = capsys.readouterr()
    return int(end.value.code or 0), shown.out, shown.err


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    status, out, err = run(capsys, *words, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_predict_shows_parts_bounds_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "predict", *SMALL, "-n", "16", "-s", "ddp + tp(2)")
    assert status == 0
    for word in ("forward", "backward", "gradients", "NVLink", "InfiniBand", "samples/s", "MFU"):
        assert word in out


def test_predict_has_a_row_for_each_number_of_workers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("predict", *SMALL, "-n", "2,4,8", "--batch", "16")
    _, out, _ = run(capsys, *words)
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["workers", "2", "4", "8"]
    _, out, _ = run(capsys, *words, "--json")
    assert [one["workers"] for one in json.loads(out)["predictions"]] == [2, 4, 8]


def test_the_first_of_a_plan_can_be_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    planned = document(capsys, "plan", *SMALL, "-n", "8", "--batch", "16")["ranked"][0]
    words = ["predict", *SMALL, "-n", "8", "--batch", "16", "-s", planned["strategy"]]
    again = document(capsys, *words, *planned["options"].split())
    assert again["step_s"] == planned["step_s"]


def test_a_plan_where_nothing_fits_fails_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "plan", *SMALL, "-n", "1", "--limit", "300MB")
    assert status == 1
    assert "nothing fits 300 MB on 1 worker: the least is " in out.replace("\n", " ")


def test_a_simulated_step_leaves_a_timeline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "step.json"
    words = ("predict", *SMALL, "-n", "4", "-s", "ddp", "--trace", str(trace))
    shown = document(capsys, *words)
    assert shown["simulated_s"] > 0
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_schedule_with_its_chunks_in_brackets_names_the_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = 'pp(8, schedule="interleaved(2)")'
    status, _, err = run(capsys, "predict", *SMALL, "-n", "8", "-s", text)
    assert status == 2 and "chunks=2" in err


def test_an_infinite_cost_of_a_byte_is_refused() -> None:
    with pytest.raises(BadInput, match="'1e400' is not a cost per byte"):
        parse_s_per_byte("1e400")
