"""Every command of docs/concepts.md ends with the status that the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import pages

PAGE = (pages.ROOT / "docs" / "concepts.md").read_text("utf-8")
Row = tuple[str, list[str], int]  # concept, commands, their exit status


def rows() -> list[Row]:
    """Of the tables that have a column of commands."""
    tables = re.findall(r"^\| concept \|.*?\n\n", PAGE, re.M | re.S)
    lines = [line for table in tables for line in table.strip().splitlines()[2:]]
    found = [line.strip("|").split(" | ") for line in lines]
    assert all(len(cells) == 4 for cells in found), "a row has four cells"
    return [
        (
            concept.strip(),
            re.findall(r"`((?:shoal|python) [^`]*)`", cell),
            2 if "status 2" in cell else 0,
        )
        for concept, _, cell, _ in found
    ]


def is_quick(row: Row) -> bool:
    return all(pages.QUICK.match(command) for command in row[1])


def test_every_concept_has_its_command_and_every_part_its_chinese_name() -> None:
    assert len(rows()) >= 60
    assert [concept for concept, commands, _ in rows() if not commands] == []
    parts = [
        line for line in PAGE.splitlines() if line.startswith("## ") and line != "## MapReduce"
    ]
    assert all(re.search("[\u4e00-\u9fff]", part) for part in parts)


@pytest.mark.parametrize("row", [*filter(is_quick, rows())], ids=lambda row: row[0])
def test_a_command_without_processes(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    for command in row[1]:
        answer = pages.run_here(command)
        assert answer.exit_code == 0 and answer.stdout, answer.stderr


@pytest.mark.whole
@pytest.mark.timeout(3600)  # some measure for as long as they need, beside others twice that
@pytest.mark.parametrize("row", [row for row in rows() if not is_quick(row)], ids=lambda r: r[0])
def test_a_command_with_workers(row: Row, tmp_path: Path) -> None:
    pages.lay_out(tmp_path)
    for command in row[1]:
        done = pages.run(command, tmp_path)
        assert done.returncode == row[2], f"{command}\n{done.stdout}\n{done.stderr}"
