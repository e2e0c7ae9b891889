"""The command line inside of the test's process, for commands that start no other."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

import pytest

from shoal.cli import main


class Answer(NamedTuple):
    exit_code: object
    stdout: str
    stderr: str


def shoal(*words: str) -> Answer:
    out = io.StringIO()
    err = io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as caught:
        main(words)
    return Answer(caught.value.code or 0, out.getvalue(), err.getvalue())


def document_of(*words: str) -> Any:
    """What a command that succeeds prints with --json, and nothing else."""
    answer = shoal(*words, "--json")
    assert (answer.exit_code, answer.stderr) == (0, "")
    return json.loads(answer.stdout)
