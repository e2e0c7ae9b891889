"""`shoal collectives run`: on the user's numbers, and over numbers of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from shoal.comm.group import Group
from shoal.commands.collective_runs import own_numbers
from shoal.commands.collective_worker import carry_out
from shoal.commands.options import parse_counts
from shoal.errors import BadInput
from shoal.runtime.chart import Axis, line_chart
from shoal.schedules.collectives.catalog import build
from shoal.schedules.collectives.cost import traffic
from tests.commands.terminal import document_of, shoal
from tests.conftest import World
from tests.scripts import shoal as shoal_process

FOUR = [[1], [2], [3], [4]]


@pytest.mark.parametrize(
    ("kind", "data", "after"),
    [
        ("reduce", "1,2,3,4", [[10], None, None, None]),
        ("gather", "1,2,3,4", [[1, 2, 3, 4], None, None, None]),
        ("all_reduce", "1,2,3,4", [[10]] * 4),
        ("all_gather", "1,2,3", [[1, 2, 3]] * 3),
        ("broadcast", "7,2,3", [[7]] * 3),
        ("scatter", "1,2,3", [[1], [2], [3]]),
        ("reduce_scatter", "1,2/10,20", [[11], [22]]),
        ("all_to_all", "1,2/3,4", [[1, 3], [2, 4]]),
        ("scan", "1,2,3,4", [[1], [3], [6], [10]]),
        ("exclusive_scan", "1,2,3,4", [[0], [1], [3], [6]]),
        ("barrier", "1,2", [None, None]),
        ("push", "1,2", [None, [1]]),
        ("pull", "1,2", [[2], None]),
    ],
)
def test_what_every_rank_has_then(world: World, kind: str, data: str, after: list[Any]) -> None:
    plan = own_numbers(kind, None, data, 0, "sum")

    def body(group: Group) -> Any:
        mine = torch.tensor(plan["rows"][group.rank], dtype=torch.int64)
        found = carry_out(group, kind, mine, plan["piece"], plan)
        return None if found is None else found.tolist()

    assert world(len(plan["rows"]), body) == after


def test_four_processes_add_up_to_ten(tmp_path: Path) -> None:
    words = ("collectives", "run", "reduce", "tree", "--data", "1,2,3,4")
    done = shoal_process(*words, "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert [one["has"] for one in document["ranks"]] == FOUR
    assert [one["result"] for one in document["ranks"]] == [[10], None, None, None]
    # 3 to 1, then 1 and 2 to 0
    assert [one["sent_bytes"] for one in document["ranks"]] == [{}, {"0": 8}, {"0": 8}, {"1": 8}]


@pytest.mark.whole
def test_shown_as_the_notes_write_it_and_measured(tmp_path: Path) -> None:
    run = ("collectives", "run")
    done = shoal_process(*run, "all_reduce", "--data", "1.5,2", "--op", "mean", cwd=tmp_path)
    assert "[1.5] [2] → all_reduce → [1.75] [1.75]" in done.stdout
    swept = (*run, "all_to_all", "shift", "--ranks", "2,4", "--processes", "2", "--json")
    document = json.loads(shoal_process(*swept, cwd=tmp_path).stdout)
    assert set(document["measured_s"]) == {"2"} and document["measured_s"]["2"] > 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["reduce", "tree"], "give the numbers of each rank with --data 1,2,3,4"),
        (["reduce", "tree", "--data", "1,x"], "--data takes numbers such as 1,2,3,4"),
        (["reduce", "tree", "--data", "1,2/3"], "every rank needs as many numbers"),
        (["reduce", "trees", "--data", "1,2"], "no algorithm 'trees' for reduce; did you mean"),
        (["reduces", "--data", "1,2"], "no collective 'reduces'"),
        (["all_to_all", "--data", "1,2"], "on every rank: --data 1,1/1,1"),
        (["reduce", "--data", "1,2", "--root", "2"], "the ranks 0 to 1, not 2"),
        (["reduce", "--data", "1,2", "--op", "plus"], "no operator 'plus'"),
        (["push", "--data", "1"], "a message between two ranks"),
        (["reduce", "--ranks", "2,0"], "--ranks takes numbers from 1 to 4,096"),
        (["reduce", "--data", ",".join("1" * 65)], "--data has 65 ranks"),
    ],
)
def test_what_does_not_suit_is_refused(words: list[str], why: str) -> None:
    answer = shoal("collectives", "run", *words)
    assert answer.exit_code == 2 and why in answer.stderr and answer.stdout == ""


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("8", [8]),
        ("2,4,8,…,64", [2, 4, 8, 16, 32, 64]),
        ("1,2,3,...,6", [1, 2, 3, 4, 5, 6]),
        ("2,5,…,12", [2, 5, 8, 11, 12]),
        ("3,4,8,…,32", [3, 4, 8, 16, 32]),
        ("4,2,2", [4, 2]),
        ("3,3,…,4", [3, 4]),
    ],
)
def test_numbers_go_on_as_they_began(text: str, numbers: list[int]) -> None:
    assert parse_counts("--ranks", text) == numbers


@pytest.mark.parametrize("text", ["", "…", "2,…,8", "2,4,…", "5000", "-1", "2,x", "9" * 5000])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="--ranks takes numbers"):
        parse_counts("--ranks", text)


@pytest.mark.parametrize(
    ("name", "idle"),
    [("ring", 0), ("star", 3 / 4), ("direct", 0), ("naive", 3 / 4), ("tree", 5 / 8)],
)
def test_links_that_are_idle(name: str, idle: float) -> None:
    """Of a ring none; of a star on four ranks, three of four ports at any time."""
    assert traffic(build("all_reduce", name, 4)).idle_share == pytest.approx(idle)


def test_all_algorithms_over_numbers_of_ranks(tmp_path: Path, whole_suite: bool) -> None:
    picture = tmp_path / "times.svg"
    words, counts = ("2,4,…,16", [2, 4, 8, 16]) if whole_suite else ("2,8", [2, 8])
    document = document_of("collectives", "--ranks", words, "--svg", str(picture))
    assert [one["ranks"] for one in document["collectives"]] == counts
    of_eight = document["collectives"][counts.index(8)]["algorithms"]
    assert of_eight[0]["redundant_bytes"] == 700e6
    names = {text.text for text in ElementTree.parse(picture).iter() if text.text}
    assert {"ring", "star", "naive", "8"} <= names
    most = "4096" if whole_suite else "16"
    shown = shoal("collectives", "--ranks", f"2,4,…,{most}", "--kind", "broadcast").stdout
    assert max(map(len, shown.splitlines())) <= 80 and "redundant" in shown


@pytest.mark.parametrize("is_log", [False, True])
def test_a_chart_of_one_point_has_an_axis(is_log: bool) -> None:
    axis = Axis("n", is_log=is_log)
    ElementTree.fromstring(line_chart("one", axis, axis, {"a": [(2.0, 2.0)]}))
