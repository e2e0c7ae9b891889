"""No page points to a file or heading that is not there; both READMEs say the same."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from shoal.schedules.collectives.catalog import build
from shoal.schedules.collectives.draw import animated_svg
from tests.docs.pages import PAGES, ROOT

MADE = ("pictures/", "reference/")  # when the site is built


@cache
def anchors(page: Path) -> set[str]:
    """Of headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    titles = [title.lower() for title in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```|(?<!\[)`[^`\n]*`", "", page.read_text("utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("http://", "https://")) or any(name in target for name in MADE):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = (ROOT / "mkdocs.yml").read_text("utf-8")
    every = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in every if f" {page}\n" not in listed] == []


def test_the_chinese_readme_has_what_the_english_one_has() -> None:
    texts = [(ROOT / name).read_text("utf-8") for name in ("README.md", "README.zh-CN.md")]
    english, chinese = ([*re.findall(r"`[^`\n]+`", text)] for text in texts)
    assert sorted(english) == sorted(chinese)
    rows, same_rows = (re.findall(r"^\|", text, re.M) for text in texts)
    links, same_links = (set(re.findall(r"\]\((docs[^)]*)\)", text)) for text in texts)
    assert len(rows) == len(same_rows) and links == same_links


def test_the_picture_of_the_readme_is_what_the_command_draws() -> None:
    drawn = animated_svg(build("all_reduce", "ring", 4))
    assert (ROOT / "docs" / "ring.svg").read_text("utf-8") == drawn
