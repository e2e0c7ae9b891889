"""One HTML file that needs nothing but a browser: assets and data are inside of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from shoal.report_page.record import RecordedRun
from shoal.report_page.sections import sections

_SCRIPTS = ("uPlot.iife.min.js", "timeline.js", "schedule.js", "page.js")
_STYLES = ("uPlot.min.css", "page.css")


def page(runs: Sequence[RecordedRun]) -> str:
    names = [f"{run.name}: {run.strategy}" for run in runs]
    title = f"Shoal: {', '.join(names)}"
    data = {"title": title, "runs": names, "sections": list(sections(runs))}
    styles = "".join(f"<style>{_asset(name)}</style>" for name in _STYLES)
    scripts = "".join(f"<script>{_asset(name)}</script>\n" for name in _SCRIPTS)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        '</title><meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"{styles}</head><body><header></header><main></main>\n"
        f'<script type="application/json" id="data">{embedded(data)}</script>\n'
        f"<!-- uPlot:\n{_asset('uPlot.LICENSE')}-->\n{scripts}</body></html>\n"
    )


def embedded(data: Any) -> str:
    """JSON in which no text can end the element that holds it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files("shoal.report_page") / "assets" / name).read_text(encoding="utf-8")
