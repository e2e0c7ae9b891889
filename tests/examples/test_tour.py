"""The notebook runs from its first cell to its last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CELLS = json.loads((ROOT / "examples" / "tour.ipynb").read_text("utf-8"))["cells"]
# a program from standard input has no file, as a notebook has none: its workers are forks
AS_A_NOTEBOOK = """
import subprocess, sys, types
shown = types.ModuleType("IPython.display")
shown.SVG = lambda file: open(file).read()
shown.display = lambda text: print(text[:4])
sys.modules["IPython"] = types.ModuleType("IPython")
sys.modules["IPython.display"] = shown
def shell(line):
    assert line.startswith("shoal ")
    subprocess.run(f"{sys.executable} -m {line}", shell=True, check=True)
"""


def code() -> str:
    """Of all cells, with lines for a shell as calls."""
    sources = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
    lines = [line for source in sources for line in [*source.splitlines(), ""]]
    calls = [f"shell({line[1:]!r})" if line.startswith("!") else line for line in lines]
    return AS_A_NOTEBOOK + "\n".join(calls)


def test_the_notebook_has_no_output_and_compiles() -> None:
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in CELLS)
    compile(code(), "tour.ipynb", "exec")


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_the_notebook_runs(tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-"],
        **{"cwd": tmp_path, "env": environ, "input": code(), "text": True, "timeout": 800},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<svg") == 2
    assert done.stdout.count("loss 0.") == 9, "one worker, and eight strategies"
