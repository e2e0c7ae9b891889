from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shoal.schedules.pipelines.catalog import CATALOG
from tests.commands.terminal import Answer, shoal
from tests.user_schedules import pipelines

__all__ = ["pipelines"]  # a fixture


def run(*arguments: str) -> Answer:
    return shoal("pipeline", *arguments)


def test_show_draws_a_gantt_chart() -> None:
    shown = run("show", "1f1b", "--stages", "3", "--microbatches", "4")
    assert shown.exit_code == 0
    assert shown.stdout == (
        "1f1b of 3 stages and 4 micro-batches\n"
        "time     0              5              10             15\n"
        "stage 0  F0 F1 F2 ·  ·  ·  ·  B0─── F3 B1─── ·  B2─── ·  B3───\n"
        "stage 1  ·  F0 F1 ·  ·  B0─── F2 B1─── F3 B2─── ·  B3─── ·  ·\n"
        "stage 2  ·  ·  F0 B0─── F1 B1─── F2 B2─── F3 B3─── ·  ·  ·  ·\n"
        "F forward   B backward   · idle\n"
        "\n"
        "time     18\n"
        "bubble   33.33% of the longest stage, from its first action to its last\n"
        "idle     33.33% of all stages, from the first action of all to the last\n"
        "holds    at most 3 2 1 micro-batches\n"
        "proven   every F before its B, each once\n"
        "         never hangs with room for 1 message from a stage to another\n"
    )


@pytest.mark.parametrize("name", list(CATALOG))
def test_every_schedule_can_be_shown_and_drawn(name: str, tmp_path: Path) -> None:
    for stages, microbatches in (("1", "1"), ("4", "8"), ("5", "3")):
        sizes = ("--stages", stages, "--microbatches", microbatches)
        assert run("show", name, *sizes).exit_code == 0
        picture = tmp_path / "picture.svg"
        shown = run("show", name, *sizes, "--svg", str(picture))
        assert shown.exit_code == 0 and str(picture) in shown.stdout
        ElementTree.parse(picture)


def test_the_list_has_every_schedule_with_its_costs() -> None:
    shown = run("list")
    assert shown.exit_code == 0
    rows = {line.split()[0]: line.split()[1:6] for line in shown.stdout.splitlines()[2:]}
    assert rows == {
        "inter-op": ["1", "96", "75.00%", "75.00%", "1"],
        "gpipe": ["1", "33", "27.27%", "27.27%", "8"],
        "1f1b": ["1", "33", "27.27%", "27.27%", "4"],
        "interleaved": ["2", "28.5", "15.79%", "15.79%", "5.5"],
        "zb-h1": ["1", "27", "11.11%", "11.11%", "4"],
        "zb-h2": ["1", "27", "0.00%", "11.11%", "7"],
        "bfs": ["2", "28.5", "15.79%", "15.79%", "8"],
    }
    document = json.loads(run("list", "--json", "--chunks", "4").stdout)
    assert [one["schedule"] for one in document["schedules"]] == list(CATALOG)
    assert [one["chunks"] for one in document["schedules"]] == [1, 1, 1, 4, 1, 1, 4]


def test_json_is_one_document_with_every_action() -> None:
    shown = run("show", "zb-h1", "--stages", "2", "--microbatches", "1", "--transfer", "0.5",
                "--forward", "1,2", "--json")  # fmt: skip
    document = json.loads(shown.stdout)
    assert document["proven"] is True and document["makespan"] == 7.0
    assert [one["peak_live"] for one in document["stages"]] == [1, 1]
    assert document["stages"][1]["actions"] == [
        {"kind": "F", "microbatch": 0, "chunk": 0, "start": 1.5, "end": 3.5},
        {"kind": "I", "microbatch": 0, "chunk": 0, "start": 3.5, "end": 4.5},
        {"kind": "W", "microbatch": 0, "chunk": 0, "start": 4.5, "end": 5.5},
    ]


def test_a_schedule_of_ones_own_is_drawn_or_refused(pipelines: Path) -> None:
    right = run("show", f"{pipelines}:zigzag", "--stages", "2", "--microbatches", "2")
    assert right.exit_code == 0 and "F0 F1 ·  ·  ·  B1─── B0───" in right.stdout
    sizes = ("--stages", "2", "--microbatches", "1", "--chunks", "3")
    assert "B0.2" in run("show", f"{pipelines}:looped", *sizes).stdout
    wrong = run("show", f"{pipelines}:forgetful")
    assert wrong.exit_code == 1 and "stage 0 never does B0" in wrong.stderr


def test_times_may_have_a_unit() -> None:
    times = ("--forward", "10ms,20ms", "--backward", "10ms", "--weight", "0", "--transfer", "100us")
    document = json.loads(run("show", "gpipe", "--stages", "2", *times, "--json").stdout)
    assert document["forward"] == [0.01, 0.02]
    assert document["transfer"] == pytest.approx(1e-4)


def test_the_command_line_does_not_import_torch() -> None:
    code = "import sys; from shoal.commands.cli import COMMANDS, build_app; build_app(COMMANDS)"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
