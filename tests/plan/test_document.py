from __future__ import annotations

from pathlib import Path

from shoal.plan.document import document
from shoal.schedules.catalog import algorithms, kinds

PATH = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_document_is_what_the_schedules_say() -> None:
    written = PATH.read_text(encoding="utf-8")
    assert written == document(), "run: python -m shoal.plan.document"


def test_every_algorithm_has_a_section_with_words() -> None:
    text = document()
    for kind in kinds():
        for name in algorithms(kind):
            section = text.split(f"### {kind}: {name}\n")[1].split("\n|")[0]
            assert "round" in section or "bytes" in section, (kind, name)
