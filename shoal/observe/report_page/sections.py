"""What the page says about a run, section by section, as data; one HTML file of it.

It needs nothing but a browser: assets and data are inside of it.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from shoal.cluster.drawing import cluster_svg
from shoal.cluster.units import show_bytes, show_seconds
from shoal.errors import BadInput
from shoal.observe.report_page.prediction import compared
from shoal.observe.report_page.record import RecordedRun
from shoal.observe.report_page.schedules import animations
from shoal.observe.report_page.traffic import link_loads, matrix
from shoal.observe.time_shares import shown_parts
from shoal.runtime import trace
from shoal.runtime.trace import Span, name_of
from shoal.runtime.wording import counted

Items = Iterable[dict[str, Any]]
_MOST_POINTS = 4000  # of a line
_MOST_LINES = 16
_MOST_BARS = 60


def about(run: RecordedRun) -> Items:
    report = run.report
    rate = report.get("samples_per_s")
    script = " ".join(map(str, report.get("script") or []))
    lost = [f"worker {one['rank']} after {one['after_s']:.1f} s" for one in report["lost"]]
    back = [f"worker {one['rank']}" for one in report["came_back"]]
    servers = f", {counted(report['servers'], 'server')}" if report.get("servers") else ""
    first, last = run.training
    evaluated = (run.ranks[0].get("evaluated") or {}) if run.ranks else {}
    facts = {
        "script": script.removeprefix("-m "),
        "strategy": report["strategy"],
        "rehearsed": f"on {report['rehearsed']}, in virtual time" if "rehearsed" in report else "",
        "workers": f"{run.workers}{servers}",
        "steps": report["steps"],
        "training": f"{(last - first) / 1e9:.2f} s (the whole run: {report['seconds']:.1f} s)",
        "samples/s": f"{rate:,.0f}" if isinstance(rate, float) else "",
        "slowed down": ", ".join(report.get("slow") or []),
        "lost": ", ".join(lost),
        "came back": ", ".join(back),
        "evaluated": ", ".join(f"{k} {v:.4g}".strip() for k, v in evaluated.items()),
    }
    yield {"type": "facts", "rows": [[k, str(v)] for k, v in facts.items() if v not in ("", None)]}


# ------------------------------------------------------------------------------ timeline, loss


def timeline(run: RecordedRun) -> Items:
    """Columns of whole µs, and texts once each: 100,000 spans are some MB."""
    kinds: dict[str, int] = {}
    texts: dict[str, int] = {"": 0}
    rows = []
    for process, spans in run.spans.items():
        tracks: dict[str, list[Span]] = {}
        for span in spans:
            if span.track != trace.ISSUED:  # moments, which the waits tell of
                tracks.setdefault(span.track.split(" ")[0], []).append(span)
        for track in sorted(tracks, key=lambda name: (name == "steps", name != "main", name)):
            own = sorted(tracks[track], key=lambda s: (s.start_ns, -s.end_ns))
            rows.append(
                {
                    "process": name_of(process),
                    "track": track,
                    "start": [s.start_ns // 1000 for s in own],
                    "length": [max(0, s.end_ns - s.start_ns) // 1000 for s in own],
                    "kind": [kinds.setdefault(s.kind, len(kinds)) for s in own],
                    "text": [texts.setdefault(_words(s), len(texts)) for s in own],
                }
            )
    if not any(row["start"] for row in rows):
        return
    view = [moment // 1000 for moment in run.training]
    yield {"type": "timeline", "rows": rows, "kinds": [*kinds], "texts": [*texts], "view": view}


def _words(span: Span) -> str:
    parts = [span.detail]
    if span.microbatch is not None:
        parts.append(f"micro-batch {span.microbatch}")
    if span.bytes:
        parts.append(show_bytes(span.bytes))
    if span.peer is not None:
        parts.append(name_of(span.peer))
    return " · ".join(part for part in parts if part)


def losses(run: RecordedRun) -> Items:
    """One line where all ranks have the same losses, else one a rank."""
    known = [rank for rank in run.ranks if rank.get("losses")]
    if known and all(rank["losses"] == known[0]["losses"] for rank in known):
        known = known[:1]
    start_s = run.training[0] / 1e9
    lines = []
    for rank in known[:_MOST_LINES]:
        every = -(-len(rank["losses"]) // _MOST_POINTS)
        picked = slice(every - 1, None, every)
        lines.append(
            {
                "name": f"rank {rank['rank']}" if len(known) > 1 else "loss",
                "y": rank["losses"][picked],
                "steps": rank["loss_steps"][picked],
                "seconds": [round(s - start_s, 6) for s in rank["loss_s"][picked]],
            }
        )
    left = len(known) - len(lines)
    note = f"{counted(left, 'rank')} more are not drawn." if left else ""
    if lines:
        yield {"type": "losses", "lines": lines, "note": note}


# ------------------------------------------------------------------------------ time, traffic


def breakdown(run: RecordedRun) -> Items:
    parts = [part for part in shown_parts(run.shares.values()) if part != "hidden"]
    rows = [
        {
            "name": name_of(process),
            "seconds": f"{each.seconds:.2f} s",
            "values": [getattr(each, part) for part in parts],
            "hidden": each.hidden,
        }
        for process, each in run.shares.items()
    ]
    if rows:
        yield {"type": "shares", "parts": parts, "rows": rows}
    names = [*run.shares]
    names += sorted(
        {p for each in run.shares.values() for p in each.waited_for} - {*names}, key=str
    )
    waits = [[run.shares[a].waited_for.get(b, 0.0) for b in names] for a in run.shares]
    if any(max(row, default=0.0) >= 5e-4 for row in waits):
        yield {
            "type": "matrix",
            "title": "Whom a rank waited for",
            "names": [name_of(one) for one in names],
            "rows": waits,
            "texts": [[f"{x:.1%}" if x >= 5e-4 else "" for x in row] for row in waits],
            "corner": "waits \\ for",
            "note": "Shares of the time of the rank in the row, waiting and bubble.",
        }


def topology(run: RecordedRun) -> Items:
    cluster = run.cluster
    if cluster is None:
        return
    picture = base64.b64encode(cluster_svg(cluster).encode()).decode()
    yield {"type": "picture", "svg": picture, "text": f"the cluster {cluster.name}"}
    heads = ["level", "link", "crossed by", "mean rate", "line rate", "load"]
    note = "Messages count at the outermost level that they cross."
    if run.report.get("servers"):
        note += " Servers are taken to be on the nodes in turn, as a run on hosts places them."
    yield from _table(heads, link_loads(run, cluster), 2, note=note)


def _table(heads: list[str], rows: list[list[str]], left: int = 1, **more: str) -> Items:
    if rows:
        yield {"type": "table", "heads": heads, "rows": rows, "left": left, **more}


def _bars(title: str, rows: Iterable[tuple[str, float, str]]) -> Items:
    """A name, a length, and how it is written; nothing where all are 0."""
    known = list(rows)
    if any(length for _, length, _ in known):
        yield {"type": "bars", "title": title, "rows": known}


# ------------------------------------------------------------------------------ strategies


def staleness(run: RecordedRun) -> Items:
    """Updates between a pull and its push; steps ahead of the slowest worker."""
    missed = [one.get("missed_updates", {}) for one in _servers(run)]
    yield from _histogram("Updates between a pull and its push", missed)
    ahead = [found for _, found in run.syncs("steps_ahead")]
    yield from _histogram("Steps that a worker was ahead of the slowest, at its pulls", ahead)
    behind = [
        (f"rank {rank['rank']}", one[key], f"{one[key]:.2f}, at most {one[f'most_{key}']}")
        for rank in run.ranks
        for one in rank.get("sync") or []
        for key in ("steps_behind", "updates_in_between")
        if key in one
    ]
    yield from _bars("Steps or updates behind, on average", behind)
    verdicts = ["admitted", "folded", "dropped"]
    workers = [item for server in _servers(run)[:1] for item in server["workers"].items()]
    skipped = dict(run.syncs("skipped"))
    rows = [
        [f"rank {rank}", *(str(one.get(v, 0)) for v in verdicts), str(skipped.get(int(rank), 0))]
        for rank, one in workers
    ]
    yield from _table(["", *verdicts, "skipped steps"], rows, title="Pushes")


def _histogram(title: str, found: list[dict[str, int]]) -> Items:
    counts: Counter[int] = Counter()
    for one in found:
        counts.update({int(k): n for k, n in one.items()})
    most = max(counts, default=-1)
    shown = range(most + 1) if most < _MOST_BARS else sorted(counts)[:_MOST_BARS]
    yield from _bars(title, ((str(k), counts[k], f"{counts[k]:,}") for k in shown))


def _servers(run: RecordedRun) -> list[dict[str, Any]]:
    known = run.syncs("servers")
    return list(known[0][1]) if known else []


def consensus(run: RecordedRun) -> Items:
    for key, name in (
        ("consensus_distance", "mean distance of the replicas to their mean"),
        ("distance_to_neighbours", "distance to the neighbours"),
    ):
        lines = []
        found = run.syncs(key)[: 1 if key == "consensus_distance" else _MOST_LINES]
        for rank, pairs in found:
            y = [value if math.isfinite(value) else None for _, value in pairs]
            x = [step for step, _ in pairs]
            known = f"rank {rank}" if len(found) > 1 else "distance"
            lines.append({"name": known, "x": x, "y": y})
        if lines:
            yield {"type": "lines", "title": name, "x": "step", "y": "distance", "lines": lines}


def servers(run: RecordedRun) -> Items:
    """Load per server, hot rows."""
    known = _servers(run)
    copied = run.strategy.sync_for(run.workers).server_replicas > 1
    names = [f"{'shard' if copied else 'server'} {i}" for i in range(len(known))]
    rows = []
    for number, one in enumerate(known):
        counts = [f"{one[key]:,}" for key in ("updates", "requests")]
        sizes = [show_bytes(one[key]) for key in ("received_bytes", "sent_bytes")]
        rows.append([names[number], *counts, *sizes, show_seconds(one["cpu_s"])])
    note = "Bytes over sockets"
    note += "; others go through shared memory." if run.syncs("shared_memory") else "."
    yield from _table(["", "updates", "requests", "received", "sent", "CPU"], rows, note=note)
    for name, load in run.syncs("tables")[0][1].items() if run.syncs("tables") else ():
        share = load["hottest_percent"]["share"]
        title = f"Hottest rows of {name}: the hottest 1% take {share:.1%} of pulls"
        hottest = [(one["row"], one["pulls"]) for one in load["hottest"]]
        yield from _bars(title, ((f"row {row}", n, f"{n:,}") for row, n in hottest))
        loads = load["as_served"]  # of servers, and then of their other replicas
        others = [f"replica {i + 1}" for i in range(len(loads) - len(known))]
        served = ((one, n, f"{n:,}") for one, n in zip([*names, *others], loads, strict=False))
        yield from _bars(f"Pulls of {name} by server", served)


def leaders(run: RecordedRun) -> Items:
    """Servers that were lost, and how long their shard had no service."""
    rows = []
    for one in run.report.get("servers_lost") or []:
        place = f"shard {one['shard']}, replica {one['replica']}"
        again = "yes" if one["is_started_again"] else "no"
        rows.append(
            [f"server {one['server']}", place, f"{one['after_s']:.2f} s", one["how"], again]
        )
    yield from _table(["lost", "was", "after", "how", "started again"], rows, 5)
    gaps = [
        (f"rank {rank}, shard {shard}", sum(times), f"{len(times)}×, {show_seconds(sum(times))}")
        for rank, shards in run.syncs("interruptions_s")
        for shard, times in enumerate(shards)
    ]
    title = "Changes of a shard's copies, and how long it had no service"
    yield from _bars(title, [gap for gap in gaps if gap[1]])


def memory(run: RecordedRun) -> Items:
    for key, title in (
        ("peak_device_bytes", "Peak memory of the GPU"),
        ("peak_host_bytes", "Peak memory of the process, with Python and torch"),
    ):
        peaks = [(f"rank {r['rank']}", r[key]) for r in run.ranks if r.get(key)]
        yield from _bars(title, ((name, peak, show_bytes(peak)) for name, peak in peaks))


SECTIONS: Sequence[tuple[str, Callable[[RecordedRun], Items]]] = (
    ("Runs", about),
    ("Timeline", timeline),
    ("Loss", losses),
    ("Where the time went", breakdown),
    ("Predicted and measured", compared),
    ("Traffic", matrix),
    ("Topology", topology),
    ("Schedule", animations),
    ("Staleness", staleness),
    ("Consensus distance", consensus),
    ("Servers", servers),
    ("Leader changes", leaders),
    ("Memory", memory),
)


def sections(runs: Sequence[RecordedRun]) -> Iterator[dict[str, Any]]:
    """Those of which a run knows something."""
    for title, items in SECTIONS:
        panels = [{"run": n, "items": _made(items, run)} for n, run in enumerate(runs)]
        panels = [panel for panel in panels if panel["items"]]
        if panels:
            yield {"id": title.lower().replace(" ", "-"), "title": title, "panels": panels}


def _made(items: Callable[[RecordedRun], Items], run: RecordedRun) -> list[dict[str, Any]]:
    try:
        made = list(items(run))
        embedded(made)  # Infinity and NaN are no JSON
        return made
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"is not one of shoal run --record: {type(error).__name__}: {error}"
        raise BadInput(f"the report of {run.name} {what}") from error


_SCRIPTS = ("uPlot.iife.min.js", "timeline.js", "schedule.js", "page.js")
_STYLES = ("uPlot.min.css", "page.css")


def page(runs: Sequence[RecordedRun]) -> str:
    names = [f"{run.name}: {run.named}" for run in runs]
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
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise ValueError("it holds Infinity or NaN where the page needs a number") from error
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files("shoal.observe.report_page") / "assets" / name).read_text(encoding="utf-8")
