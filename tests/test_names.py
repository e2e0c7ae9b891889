"""One name, one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import shoal

ROOT = Path(shoal.__file__).parent


def test_no_two_public_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(ROOT)))
    shared = {name: files for name, files in homes.items() if len(files) > 1}
    assert not shared
