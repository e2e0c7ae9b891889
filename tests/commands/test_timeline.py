"""`shoal timeline`: rows of a trace in the terminal, as a picture and as JSON."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from shoal.observe.time_shares import write_chrome
from shoal.runtime.trace import Recorder
from tests.commands.terminal import document_of, shoal
from tests.observe.test_timeline import BRIEF, PIPELINE, SERVER, STRAGGLER
from tests.scripts import PLAIN
from tests.scripts import shoal as started

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    write_chrome(STRAGGLER, tmp_path / "trace.json")
    return tmp_path / "trace.json"


def test_rows_kinds_waits_and_the_critical_path_are_printed(trace: Path) -> None:
    shown = shoal("timeline", str(trace))
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert [line.rstrip() for line in shown.stdout.splitlines()] == [
        "step 1: 110 ms",
        "ms      0         10        20        30        40        50        60        70        80"
        "        90        100",
        "rank 0  F0───────────────── B0───────────────── "
        "············································" + "·" * 16 + "U────────",
        "rank 1  F0────────────────────── B0────────────────────── "
        "Z────────────────────────────────────── ········  U───",
        "",
        "where the time went, in training",
        "rank seconds computing exposed waiting injected other",
        "   0    0.11     45.5%    9.1%   45.5%     0.0%  0.0%",
        "   1    0.10     52.4%    7.6%    0.0%    38.1%  1.9%",
        "rank 0 waited for rank 1 45.5%",
        "",
        "kinds of spans, in training",
        "  kind     on       spans in all of the time  sent",
        "· wait     worker       2  68 ms       31.6%",
        "F forward  worker       2  45 ms       20.9%",
        "B backward worker       2  45 ms       20.9%",
        "Z injected worker       1  40 ms       18.6%",
        "U update   worker       2  15 ms        7.0%",
        "  other    worker           2 ms        0.9%",
        "  reduce   transfer     2  66 ms             128 B",
        "",
        "critical path of step 1, 110 ms",
        "  rank 1: F0 25 ms, B0 25 ms, injected 40 ms → rank 0: exposed 10 ms,",
        "    update 10 ms",
    ]


def test_processes_next_to_each_other_on_a_printed_path_differ(tmp_path: Path) -> None:
    write_chrome(BRIEF, tmp_path / "trace.json")
    hops = document_of("timeline", str(tmp_path))["steps"]["1"]["critical_path"]
    assert [hop["process"] for hop in hops] == ["rank 1", "rank 0", "rank 1"]
    lines = [line.strip() for line in shoal("timeline", str(tmp_path)).stdout.splitlines()]
    assert lines[-1] == "rank 1: forward 50 ms, exposed 1 ms, backward 48 ms"


def test_the_document_has_the_same(trace: Path) -> None:
    found = document_of("timeline", str(trace), "--steps", "1")
    assert [hop["process"] for hop in found["steps"]["1"]["critical_path"]] == ["rank 1", "rank 0"]
    assert found["shares"]["rank 0"]["waited_for"] == {"1": pytest.approx(5 / 11)}
    assert [s["kind"] for s in found["rows"]["rank 1"]][:3] == ["forward", "backward", "injected"]
    sent = {"spans": 2, "seconds": pytest.approx(0.066), "sent_bytes": 128, "share": None}
    assert found["kinds"][-1] == {"kind": "reduce", "where": "transfer", **sent}


@pytest.mark.parametrize(("spans", "rows"), [(PIPELINE, 2), (SERVER, 3)], ids=["pp", "ps"])
def test_a_picture_has_a_row_for_each_process_and_numbers_of_micro_batches(
    tmp_path: Path, spans: dict[int, list[object]], rows: int
) -> None:
    write_chrome(spans, tmp_path / "trace.json")  # type: ignore[arg-type]
    picture = tmp_path / "a.svg"
    answer = shoal("timeline", str(tmp_path), "--svg", str(picture))
    assert answer.exit_code == 0 and str(picture) in answer.stdout
    root = ElementTree.parse(picture).getroot()
    names = [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "stage"]
    assert names == [*(f"rank {r}" for r in range(2)), "server 0"][:rows]
    labels = [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "one"]
    assert labels == (["0", "1", "0", "0", "0"] if rows == 2 else [])
    titles = [t.text or "" for t in root.iter(f"{SVG}title")]
    assert any("wait" in title for title in titles)


def test_spans_of_each_process_in_a_folder_are_a_trace_too(tmp_path: Path) -> None:
    recorder = Recorder(0, 0)
    recorder.spans = STRAGGLER[0]
    recorder.write(tmp_path)
    assert "rank 0  F0" in shoal("timeline", str(tmp_path)).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", "a"), "--steps takes a step as 20, or the first and the last as 20:23"),
        (("--steps", "3:"), "--steps takes a step"),
        (("--steps", "3:2"), "ends before it begins"),
        (("--steps", "7:9"), "there is no step from 7 to 9: the trace has steps 1 to 1"),
        (("--svg", "none/a.svg"), "cannot write none/a.svg"),
    ],
)
def test_what_makes_no_sense_is_refused(trace: Path, words: tuple[str, ...], message: str) -> None:
    answer = shoal("timeline", str(trace), *words)
    assert answer.exit_code == 2 and message in answer.stderr and not answer.stdout


def test_a_place_without_a_trace_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none.json"):
        answer = shoal("timeline", str(place))
        assert answer.exit_code == 2 and "shoal run --trace FILE writes one" in answer.stderr


def test_run_draws_two_steps_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    done = started("run", "-n", "2", "-s", "ps", "--timeline", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\nsteps 6 to 7: " in done.stdout and "\ncritical path of step 7, " in done.stdout
    lines = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert {"rank 0", "rank 1", "server 0"} <= set(lines)
    assert not list(tmp_path.glob("*.json")), "without --trace no file is left"
