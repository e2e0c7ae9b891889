"""`shoal plan validate` on a table of two plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli import main

TABLE = """\
gpus,batch,micro_batch,hidden,heads,layers,sequence,tp,dp,pp,iteration_ms
8,16,1,1024,16,8,1024,1,8,1,30
8,16,1,1024,16,8,1024,8,1,1,90
"""


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "validate", *words])
    out, err = capsys.readouterr()
    return stopped.value.code, out, err


@pytest.fixture
def table(tmp_path: Path) -> str:
    file = tmp_path / "table.csv"
    file.write_text(TABLE)
    return str(file)


def test_errors_order_and_regret_are_printed(
    capsys: pytest.CaptureFixture[str], table: str
) -> None:
    status, out, _ = run(capsys, table)
    assert not status
    for words in ("mean absolute error", "bias", "rank correlation", "regret", "worst rows"):
        assert words in out
    assert "picked in 1 of 1 choices" in out


def test_json_is_one_document(capsys: pytest.CaptureFixture[str], table: str) -> None:
    _, out, _ = run(capsys, table, "--json")
    document = json.loads(out)
    assert [row["line"] for row in document["rows"]] == [2, 3]
    assert document["regret"] == 0
    assert document["fitted"] == {}


def test_a_fit_says_its_constants_and_their_bounds(
    capsys: pytest.CaptureFixture[str], table: str
) -> None:
    _, out, err = run(capsys, table, "--fit", "--folds", "2")
    assert "matmul_efficiency" in out
    assert "least" in out
    assert not err  # less than 10 s
    _, out, _ = run(capsys, table, "--fit", "--folds", "2", "--json")
    document = json.loads(out)
    assert document["fitted"].keys() == document["bounds"].keys()
    for name, end in document["at_bound"].items():
        bound = document["bounds"][name][end == "highest"]
        assert document["fitted"][name] == pytest.approx(bound, rel=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recompute", "some"], "--recompute some is not one of none, selective, full"),
        (["--order", "other"], "--order other is not one of megatron, shoal"),
        (["--write", "fit.toml"], "--write needs --fit"),
        (["--fit"], "folds=5 must be 2 or more, and at most the 2 rows"),
    ],
)
def test_bad_input_is_a_sentence(
    capsys: pytest.CaptureFixture[str], table: str, words: list[str], said: str
) -> None:
    status, _, err = run(capsys, table, *words)
    assert status == 2
    assert said in err
