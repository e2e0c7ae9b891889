"""Questions about the source files, asked in one pass: to parse all of them takes seconds.

@question
def classes(path: Path, nodes: list[ast.AST]) -> Iterator[str]: …

answers(classes)        of every file of shoal, by its path
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHOAL = ROOT / "shoal"
OLDEST = (3, 10)  # Python that reads them
Question = Callable[[Path, list[ast.AST]], Iterable[Any]]
_ASKED_IN = (
    *("tests.runtime.test_config", "tests.runtime.test_run_dir", "tests.runtime.test_syntax"),
    "tests.strategy.test_terms_describe_themselves",
    *("tests.test_layers", "tests.test_names", "tests.test_python_versions"),
)
_questions: list[Question] = []


def question(ask: Question) -> Question:
    """`nodes` are all nodes of the tree of a file; the first is the module."""
    _questions.append(ask)
    return ask


def answers(ask: Question, folder: str = "shoal") -> dict[Path, list[Any]]:
    assert ask.__module__ in _ASKED_IN, "add it, so that it is asked together with the others"
    return {path: found[ask] for path, found in _read(folder).items()}


@cache
def _read(folder: str) -> dict[Path, dict[Question, list[Any]]]:
    for name in _ASKED_IN:
        import_module(name)
    return {path: _read_file(path) for path in sorted((ROOT / folder).rglob("*.py"))}


def _read_file(path: Path) -> dict[Question, list[Any]]:
    tree = ast.parse(path.read_text(), str(path), feature_version=OLDEST)
    nodes = list(ast.walk(tree))
    return {ask: list(ask(path, nodes)) for ask in _questions}
