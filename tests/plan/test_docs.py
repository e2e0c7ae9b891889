from __future__ import annotations

from pathlib import Path

from benchmarks.docs import document, pipeline_document
from shoal.schedules.collectives.catalog import algorithms, kinds

DOCS = Path(__file__).parents[2] / "docs"


def test_the_document_is_what_the_schedules_say() -> None:
    for name, text in (("algorithms", document()), ("pipelines", pipeline_document())):
        written = (DOCS / f"{name}.md").read_text(encoding="utf-8")
        assert written == text, "run: python -m benchmarks.docs"


def test_every_algorithm_has_a_section_with_words() -> None:
    text = document()
    for kind in kinds():
        for name in algorithms(kind):
            section = text.split(f"### {kind}: {name}\n")[1].split("\n|")[0]
            assert "round" in section or "bytes" in section, (kind, name)
