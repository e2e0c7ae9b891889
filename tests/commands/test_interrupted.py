"""Ctrl-C ends a command with one line and status 130."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from shoal import __main__, cli
from shoal.commands import plan


def test_an_interrupted_command_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "search", interrupt)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "gpt-3", "--cluster", "dgx-a100"])
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err) == (130, "", "shoal: interrupted\n")


class InterruptedLoading(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise KeyboardInterrupt if name in ("main", "app") else AttributeError(name)


@pytest.mark.parametrize("module", ["shoal.cli", "shoal.commands.keys"])
def test_ctrl_c_while_modules_are_loaded_is_one_line_too(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, InterruptedLoading(module))
    monkeypatch.setattr(sys, "argv", ["shoal", "keys"])
    with pytest.raises(SystemExit) as stopped:
        __main__.main()
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err) == (130, "", "shoal: interrupted\n")
