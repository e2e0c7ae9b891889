"""One name, one thing."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import shoal
from tests.sources import SHOAL, answers, question


@question
def public_classes(path: Path, nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def test_no_two_public_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path, names in answers(public_classes).items():
        for name in names:
            homes[name].append(str(path.relative_to(SHOAL)))
    shared = {name: files for name, files in homes.items() if len(files) > 1}
    assert not shared


def test_files_that_the_map_of_the_code_names_are_there() -> None:
    root = SHOAL.parent
    for page in (root / "ARCHITECTURE.md", root / "docs" / "internals.md"):
        named = set(re.findall(r"`([\w/]+(?:\.py|\.c|/))`", page.read_text()))
        lost = [name for name in named if not (root / name).exists() and not _in_package(name)]
        assert named and not lost


def _in_package(name: str) -> bool:
    return (SHOAL / name).exists() or any(SHOAL.rglob(name.strip("/")))


def test_every_public_name_can_be_loaded() -> None:
    assert [name for name in dir(shoal) if getattr(shoal, name, None) is None] == []


def test_one_version() -> None:
    root = SHOAL.parent
    (released,) = re.findall(r'^version = "(.*)"$', (root / "pyproject.toml").read_text(), re.M)
    latest = re.findall(r"^## ([\d.]+)", (root / "CHANGELOG.md").read_text(), re.M)[0]
    assert shoal.__version__ == released == latest


USERS_FILES = {"train.py", "a.py", "b.py", "mine.py"}  # of the examples in docstrings


@question
def named_files(path: Path, nodes: list[ast.AST]) -> Iterator[str]:
    """Names of Python files in comments and docstrings: with their folder, or of the same room."""
    text = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    said = [token.string for token in tokens if token.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    said += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    for sentence in said:
        yield from re.findall(r"(?<![\w/.])(?:[a-z_]+/)*[a-z_]+\.py\b", sentence)


def test_files_that_comments_name_are_there() -> None:
    lost = []
    for path, names in answers(named_files).items():
        room = SHOAL / path.relative_to(SHOAL).parts[0]
        homes = [SHOAL.parent, SHOAL, *path.parents, *(room.rglob("*/") if room.is_dir() else ())]
        for name in set(names) - USERS_FILES:
            if not any((home / name).exists() for home in homes):
                lost.append(f"{path.relative_to(SHOAL)}: {name}")
    assert not lost
