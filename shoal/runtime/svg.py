"""SVG as text: elements, and a document that needs nothing but a browser."""

from __future__ import annotations

from html import escape

FONT = "text{font-family:system-ui,'DejaVu Sans',sans-serif;fill:#1d2733}"
WORDS = """.title{font-size:20px;font-weight:700}.name{font-size:15px;font-weight:700}
.note{font-size:13px;fill:#5a6675}"""
DARK = "@media(prefers-color-scheme:dark){svg{filter:invert(.93) hue-rotate(180deg)}}"
TIP = (  # of an arrow: marker_end="url(#tip)"
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#1d2733"/></marker></defs>'
)
_Value = str | float | None


def element(name: str, content: str = "", **attributes: _Value) -> str:
    """Numbers to a tenth of a pixel; `text_anchor` is `text-anchor`, `class_` is `class`."""
    given = ""
    for key, value in attributes.items():
        if value is not None:
            shown = f"{value:.1f}" if isinstance(value, float) else value
            given += f' {key.rstrip("_").replace("_", "-")}="{shown}"'
    return f"<{name}{given}>{content}</{name}>" if content else f"<{name}{given}/>"


def text(x: float, y: float, words: str, kind: str | None = None, **attributes: _Value) -> str:
    return element("text", escape(words), class_=kind, x=x, y=y, **attributes)


def box(
    corner: tuple[float, float],
    size: tuple[float, float],
    kind: str | None = None,
    content: str = "",
    **attributes: _Value,
) -> str:
    (x, y), (width, height) = corner, size
    return element("rect", content, class_=kind, x=x, y=y, width=width, height=height, **attributes)


def path(d: str, kind: str, **attributes: _Value) -> str:
    return element("path", "", class_=kind, d=d, **attributes)


def document(
    title: str, size: tuple[float, float], style: str, body: list[str], background: str = "#fbfcfd"
) -> str:
    width, height = (f"{length:.0f}" for length in size)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" style="max-width:100%;height:auto">'
        f"<title>{escape(title)}</title><style>{FONT}{style}{DARK}</style>"
        f'<rect width="100%" height="100%" fill="{background}"/>{"".join(body)}</svg>\n'
    )
