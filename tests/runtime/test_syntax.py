"""Only one place of Shoal makes syntax trees: there one thread does so at a time."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.sources import SHOAL, answers, question


@question
def parses(file: Path, nodes: list[ast.AST]) -> list[str]:
    return [
        f"{file}:{node.lineno}"
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr == "parse"
        and isinstance(node.value, ast.Name)
        and node.value.id == "ast"
    ]


def test_no_other_file_makes_syntax_trees() -> None:
    found = answers(parses)
    assert found.pop(SHOAL / "runtime" / "decoders.py"), "what is sought is there"
    assert [line for lines in found.values() for line in lines] == []
