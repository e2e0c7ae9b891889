"""Ctrl-C ends a command with one line and status 130."""

from __future__ import annotations

import pytest

from shoal import cli
from shoal.commands import plan_validate


def test_an_interrupted_command_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_validate, "read_table", interrupt)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "validate", "table.csv"])
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err) == (130, "", "shoal: interrupted\n")
