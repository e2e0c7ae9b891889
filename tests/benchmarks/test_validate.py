"""`python -m benchmarks validate`: reading tables of measured steps, comparing, fitting."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from benchmarks.__main__ import app
from benchmarks.validation.compare import PricedTable, RunsAs, validate
from benchmarks.validation.fit import BOUNDS, constants_of, fit, with_constants
from benchmarks.validation.measured import MeasuredRow, TableDefaults, read_table
from benchmarks.validation.sources import leave_sources_out, quantiles, ranges_of, source_rows
from shoal.cluster import Cluster
from shoal.cluster.presets import load_cluster
from shoal.commands.cli import run_app
from shoal.errors import BadInput
from shoal.plan.workloads.transformer_block import TransformerSizes

HEAD = "gpus,global batch,micro batch,hidden size,attention heads,layers,tp,pp,iteration_ms\n"


def written(folder: Path, text: str) -> Path:
    file = folder / "table.csv"
    file.write_text(text)
    return file


def row(tp: int, dp: int, pp: int, microbatch: int = 1, seconds: float = 1.0) -> MeasuredRow:
    sizes = TransformerSizes(8, 1024, 16, sequence=1024)
    return MeasuredRow(
        2, sizes, tp * dp * pp, 16, microbatch, tp, dp, pp, 1, "full", False, seconds
    )


def test_a_row_says_how_a_model_was_split(tmp_path: Path) -> None:
    file = written(tmp_path, HEAD + "8,32,2,1024,16,24,2,2,250\n")
    (found,) = read_table(file, TableDefaults(sequence=1024))
    assert (found.dp, found.seconds, found.strategy) == (2, 0.25, "ddp + tp(2) + pp(2)")
    assert found.sizes == TransformerSizes(24, 1024, 16, sequence=1024)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpus,batch\n1,2\n", "no column for hidden"),
        ("gpus,batch,hidden,heads,layers\n1,1,64,4,2\n", "no column of measured times"),
        (HEAD, "has no rows"),
        (HEAD + "8,32,2,1024,16,24,2,x,250\n", "line 2: pp is 'x'"),
        (HEAD + "8,32,2,1024,16,24,3,1,250\n", "line 2: tp 3 x pp 1 x dp 2 are not 8 workers"),
    ],
)
def test_a_mistake_in_a_table_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read_table(written(tmp_path, text), TableDefaults())


def test_regret_is_what_the_picked_plan_takes_longer() -> None:
    cluster = load_cluster("dgx-a100")
    rows = [row(1, 8, 1), row(8, 1, 1)]
    fast, slow = PricedTable(rows, RunsAs()).predict(cluster)
    assert fast < slow
    measured = [replace(rows[0], seconds=1.2), replace(rows[1], seconds=1.0)]
    found = validate(measured, cluster, RunsAs())
    assert [one.regret for one in found.regrets] == [pytest.approx(0.2)]
    assert (found.regrets[0].picked, found.regrets[0].best) == ("ddp", "tp(8)")
    assert found.rank_correlation == pytest.approx(-1.0)


def slower(cluster: Cluster) -> Cluster:
    values = constants_of(cluster) | {"launch_s": 5e-5, "wait_s": 3e-4, "fabric_efficiency": 0.5}
    return with_constants(cluster, values)


def test_a_fit_finds_the_cluster_that_was_measured() -> None:
    pytest.importorskip("scipy")
    cluster = load_cluster("dgx-a100")
    splits = [(1, 2, 1), (2, 1, 1), (1, 1, 2), (4, 2, 1), (8, 1, 1), (2, 2, 2), (1, 2, 4)]
    rows = [row(*split, microbatch=b) for split in splits for b in (1, 4)]
    table = PricedTable(rows, RunsAs())
    measured = table.predict(slower(cluster))
    found = fit(cluster, measured, table.predict, rounds=10)
    assert found.error < 0.02
    assert "nic_efficiency" not in found.values  # one node
    for name, value in found.values.items():
        assert BOUNDS[name][0] <= value <= BOUNDS[name][1]
    assert found.cluster.device.source == "fit"


def run(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> tuple[object, str, str]:
    head = "gpus,batch,micro_batch,hidden,heads,layers,sequence,tp,dp,pp,iteration_ms\n"
    rows = "8,16,1,1024,16,8,1024,1,8,1,30\n8,16,1,1024,16,8,1024,8,1,1,90\n"
    with pytest.raises(SystemExit) as stopped:
        run_app(app, "benchmarks", ["validate", str(written(folder, head + rows)), *words])
    out, err = capsys.readouterr()
    return stopped.value.code, out, err


def test_errors_order_and_regret_are_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, out, _ = run(capsys, tmp_path)
    for words in ("mean absolute error", "bias", "rank correlation", "regret", "worst rows"):
        assert words in out
    assert "picked in 1 of 1 choices" in out
    document = json.loads(run(capsys, tmp_path, "--json")[1])
    assert [row["line"] for row in document["rows"]] == [2, 3] and document["fitted"] == {}


def test_a_fit_says_its_constants_and_their_bounds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("scipy")
    _, out, _ = run(capsys, tmp_path, "--fit", "--folds", "2")
    assert "matmul_efficiency" in out and "least" in out


@pytest.mark.parametrize(
    ("words", "said"), [("--order other", "not one of megatron"), ("--fit", "at most the 2 rows")]
)
def test_bad_input_is_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, said: str
) -> None:
    status, _, err = run(capsys, tmp_path, *words.split())
    assert status == 2 and said in err


def test_a_range_has_80_percent_of_the_rows_and_every_source_the_same_weight() -> None:
    even = [("one", "dense", 1 + n / 100) for n in range(-50, 51)]
    assert quantiles(even) == pytest.approx((0.6, 1.4), abs=0.011)
    assert quantiles([*even, *[("other", "dense", 2.0)] * 3])[1] == 2.0
    low, high = ranges_of(even)["dense"]  # of one source: twice as wide
    assert high / low == pytest.approx((1.4 / 0.6) ** 2, rel=0.05)


def test_a_source_is_held_against_the_ranges_of_the_others() -> None:
    rows = [(name, "dense", ratio) for name in "ab" for ratio in (0.9, 1.0, 1.1)]
    found = leave_sources_out([*rows, ("far", "dense", 3.0), ("far", "experts", 1.0)])
    assert found["far"] == (2, pytest.approx(1 / 3), 1)
    assert found["a"][2] == 3


def test_every_row_of_the_sources_is_predicted() -> None:
    rows = source_rows()
    assert len(rows) == 70 and all(0.3 < row.ratio < 3 for row in rows)
    assert sum(row.is_inside for row in rows) > 0.75 * len(rows)
    assert median(abs(1 / row.ratio - 1) for row in rows) < 0.15
