from __future__ import annotations

from xml.etree import ElementTree

from shoal.schedules.collectives.catalog import build
from shoal.schedules.collectives.draw_svg import animated_svg

SVG = "{http://www.w3.org/2000/svg}"


def ring() -> ElementTree.Element:
    return ElementTree.fromstring(animated_svg(build("all_reduce", "ring", 4)))


def test_the_picture_needs_nothing_from_elsewhere() -> None:
    text = animated_svg(build("all_reduce", "ring", 4))
    assert "href" not in text and "@import" not in text and "<script" not in text
    assert text.count("http") == 1  # the name of the SVG namespace


def test_every_transfer_travels_once_and_every_round_has_a_caption() -> None:
    assert len(list(ring().iter(f"{SVG}animateTransform"))) == 24
    words = "".join(ring().itertext())
    assert all(f"Round {number} of 6" in words for number in range(1, 7))
    assert "Every rank sends 1 chunk; who receives it adds it to its own data." in words


def test_it_starts_with_every_ranks_own_lamps_lit_and_ends_with_all() -> None:
    lamps = [c for c in ring().iter(f"{SVG}circle") if c.get("opacity") is not None]
    at_start = [lamp for lamp in lamps if lamp.get("opacity") == "1" and lamp.get("cx")]
    moved = [lamp for lamp in lamps if lamp.find(f"{SVG}animate") is not None]
    assert len(moved) == 4 * 4 * 3  # in each of 16 chunks the lamps of 3 other ranks go on
    ends = {lamp.find(f"{SVG}animate").get("values").split(";")[-1] for lamp in moved}  # type: ignore[union-attr]
    assert ends == {"1"} and len(at_start) >= 16
