"""Pages of the documentation: their code blocks, and commands as readers would type them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests import forked
from tests.commands import terminal

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md")),
    *(ROOT / "ARCHITECTURE.md", ROOT / "examples" / "README.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# commands that start no process, and take a fraction of a second
QUICK = re.compile(
    r"shoal (graphs|pipeline|cluster show"
    r"|collectives (show|--kind|--ranks \d+ |--bytes|--cluster seeds))"
)


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in _blocks(page) if block.language in languages]


def languages() -> set[str]:
    return {block.language for page in PAGES for block in _blocks(page)}


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    for found in re.finditer(r'^```(\w*)(?: title="([^"\n]*)")?\n(.*?)^```$', text, re.M | re.S):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page, line, found[1], found[2] or "", found[3])


def lines(block: Block) -> list[str]:
    """Its commands: without prompts, comments, and ends of lines that are continued."""
    joined = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        joined = [line[2:] for line in joined if line.startswith("$ ")]
    return [re.sub(r"\s+# .*", "", line).strip() for line in joined if line.strip()]


def lay_out(folder: Path, page: Path | None = None) -> None:
    """A folder that looks like a checkout, with the files that the page shows."""
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    every = blocks("python", "toml")
    shown = [block for block in every if block.page == page and block.title]
    (script,) = [block for block in every if block.page.name == "README.md" and block.title]
    for block in [script, *shown]:
        (folder / block.title).write_text(block.text, "utf-8")


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command that begins with `shoal`, `python`, or a variable."""
    words = shlex.split(command)
    mine = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder / ".config"), "XDG_CACHE_HOME": ""}
    environ = {**os.environ, **mine, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        environ[name] = value
    program, *rest = words
    assert program in ("shoal", "python"), command
    start = ["-m", "shoal", *rest] if program == "shoal" else rest
    runner = forked.run if program == "shoal" else subprocess.run
    done: subprocess.CompletedProcess[str] = runner(
        [sys.executable, *start],
        **{"cwd": folder, "env": environ, "capture_output": True, "timeout": 1800},
        text=True,
    )
    return done


def run_here(command: str) -> terminal.Answer:
    return terminal.shoal(*shlex.split(command)[1:])
