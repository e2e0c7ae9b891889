"""What is done in one file of shoal, and nowhere else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from shoal.runtime.config import VARIABLES
from tests.sources import SHOAL, Question, answers, question

FILES = re.compile(
    r"(all-joined|(failure|finished|exited|report|operations|spans|server|start|tally)-)$"
)
ENVIRONMENT = {"environ", "environb", "getenv"}


@question
def uses_of_environment(path: Path, nodes: list[ast.AST]) -> list[str]:
    found = [
        node
        for node in nodes
        if (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT)
        and ast.unparse(node.value) == "os"
    ]
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "os"]
    found += [n for n in imports if ENVIRONMENT & {alias.name for alias in n.names}]
    return [f"{path}:{node.lineno}" for node in found]


@question
def variables(path: Path, nodes: list[ast.AST]) -> list[str]:
    """Names may stand in sentences; as a text of their own they are a second definition."""
    return [f"{path}: {text}" for text in _texts(nodes) if text in VARIABLES]


@question
def names_of_files(path: Path, nodes: list[ast.AST]) -> list[str]:
    """As a text, or as the beginning of an f-string."""
    return [f"{path}: {text}" for text in _texts(nodes) if FILES.match(text)]


@question
def parses(path: Path, nodes: list[ast.AST]) -> list[str]:
    named = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr == "parse"]
    return [f"{path}:{node.lineno}" for node in named if ast.unparse(node) == "ast.parse"]


def _texts(nodes: list[ast.AST]) -> list[str]:
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


@pytest.mark.parametrize(
    ("ask", "home"),
    [
        (uses_of_environment, "config.py"),
        (variables, "config.py"),
        (names_of_files, "run_dir.py"),
        (parses, "decoders.py"),
    ],
)
def test_no_other_file_does_it(ask: Question, home: str) -> None:
    found = answers(ask)
    assert found.pop(SHOAL / "runtime" / home), "what is sought is there"
    assert [line for lines in found.values() for line in lines] == []
