"""What replicas of a parameter server cost and give, as bars in an SVG."""

from __future__ import annotations

from html import escape
from typing import Any

_STYLE = (
    "text{font-family:system-ui,'DejaVu Sans',sans-serif;font-size:14px;fill:#1d2733}"
    ".title{font-size:18px;font-weight:700}.note{font-size:12px;fill:#5a6675}"
)
_COLORS = {"strong": "#0072b2", "eventual": "#e69f00"}
_WIDTH = 900
_BAR = 26
_LEFT = 190
_LONGEST = 520


def draw(document: dict[str, Any]) -> str:
    """Two groups of bars: ms a push, and seconds without service at a kill."""
    results = document["results"]
    pushes = [(_name(r), r["push"]["median_ms"], r["consistency"], "ms") for r in results]
    kept = [r for r in results if r["without_service_s"] is not None]
    gaps = [(_name(r), r["without_service_s"], r["consistency"], "s") for r in kept]
    parts, bottom = _group("ms until a push is acknowledged", pushes, 60)
    more, bottom = _group("seconds without service when the head is killed", gaps, bottom + 20)
    notes = [
        f"{_name(r)}: copies up to {r['largest_lag']} pushes apart, {r['refused']} pushes refused, "
        f"{r['undone']} acknowledged pushes undone"
        for r in kept
    ]
    for note in notes:
        bottom += 20
        more.append(f'<text class="note" x="20" y="{bottom}">{escape(note)}</text>')
    size = f"{document['bytes'] / 1e6:g} MB"
    title = f"Replicated parameter server: {document['workers']} workers push {size}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 24}">'
        f"<style>{_STYLE}</style>"
        f'<rect width="{_WIDTH}" height="{bottom + 24}" fill="#fff"/>'
        f'<text class="title" x="20" y="32">{escape(title)}</text>'
    )
    return "\n".join([head, *parts, *more, "</svg>"]) + "\n"


def _name(result: dict[str, Any]) -> str:
    if result["replicas"] == 1:
        return "1 copy"
    return f"{result['replicas']} replicas, {result['consistency']}"


def _group(title: str, bars: list[tuple[str, float, str, str]], top: int) -> tuple[list[str], int]:
    parts = [f'<text x="20" y="{top + 16}" font-weight="700">{escape(title)}</text>']
    most = max((value for _, value, _, _ in bars), default=1.0) or 1.0
    y = top + 28
    for name, value, consistency, unit in bars:
        width = max(2.0, _LONGEST * value / most)
        middle = y + _BAR / 2 + 5
        parts.append(f'<text x="20" y="{middle}">{escape(name)}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 6}" '
            f'fill="{_COLORS[consistency]}"/>'
        )
        shown = f"{value:.3g} {unit}"
        parts.append(f'<text x="{_LEFT + width + 8:.1f}" y="{middle}">{shown}</text>')
        y += _BAR
    return parts, y
