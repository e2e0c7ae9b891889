"""The command line inside of the test's process; `shoal_apart` for commands that start others."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

import pytest

from shoal.commands.cli import main
from tests import forked


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


def shoal_apart(*words: str) -> Answer:
    """For commands that start processes: it and they are forks of one that has loaded torch."""
    command = [sys.executable, "-m", "shoal", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run(command, env=environ, capture_output=True, text=True, timeout=100)
    return Answer(done.returncode, done.stdout, done.stderr)


def document_of(*words: str) -> Any:
    """What a command that succeeds prints with --json, and nothing else."""
    answer = shoal(*words, "--json")
    assert (answer.exit_code, answer.stderr) == (0, "")
    return json.loads(answer.stdout)
