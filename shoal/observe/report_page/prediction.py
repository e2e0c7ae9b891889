"""Predicted beside measured, with the gap by its parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any

from shoal.cluster.units import show_bytes, show_seconds
from shoal.observe.report_page.record import RecordedRun
from shoal.runtime import trace

_OF_SPAN = {"forward": "forward", "backward": "backward", "weight gradient": "backward"}
_OF_SPAN |= {"update": "update"}
_OF_PART = {"recompute": "forward", "accumulate": "backward", "fixed": "other"}  # predicted ones
_PARTS = ("forward", "backward", "update", "communication", "bubble")
_ONLY_MEASURED = ("loading", "injected", "other")


def compared(run: RecordedRun) -> Iterator[dict[str, Any]]:
    """Seconds of a step, part by part; the gaps of the parts add up to that of the step."""
    predicted = run.report.get("prediction")
    measured = measured_parts(run)
    if not isinstance(predicted, dict) or not measured:
        return
    parts = dict.fromkeys((*_PARTS, *_ONLY_MEASURED), 0.0)
    for name, seconds, _ in predicted["parts"]:
        parts[_OF_PART.get(name, name if name in parts else "communication")] += float(seconds)
    rows = []
    for name in parts:
        mine = measured.get(name, 0.0)
        theirs = parts[name]
        if mine or theirs:
            rows.append([name, *map(_shown, (theirs, mine)), _gap(mine - theirs)])
    total = sum(measured.values())
    sum_of_parts = float(predicted["step_s"])
    rows.append(["a step", *map(_shown, (sum_of_parts, total)), _gap(total - sum_of_parts)])
    note = (
        f"Predicted for {predicted['cluster']}: "
        f"{show_seconds(float(predicted['low_s']))} to {show_seconds(float(predicted['high_s']))} "
        "a step. Measured: the mean over ranks; waiting for a peer is part of communication, "
        "Python and copies are other. Loading and injected sleep are not predicted."
    )
    heads = ["part", "predicted", "measured", "gap"]
    yield {"type": "table", "heads": heads, "rows": rows, "note": note, "left": 1, "sums": True}
    memory = predicted.get("memory")
    if isinstance(memory, dict):
        kinds = [(kind, float(size)) for kind, size in memory.items() if size]
        bars = [[kind, size, show_bytes(size)] for kind, size in kinds]
        yield {"type": "bars", "title": "Predicted memory of the fullest device", "rows": bars}


def _shown(seconds: float) -> str:
    return show_seconds(seconds) if seconds else "–"


def _gap(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '−'}{show_seconds(abs(seconds))}"


def measured_parts(run: RecordedRun) -> dict[str, float]:
    """Seconds of one step, the mean over ranks; they add up to the step."""
    ranks = [rank for rank in run.shares if run.shares[rank].seconds]
    steps = {rank: sum(s.kind == trace.STEP for s in run.spans[rank]) for rank in ranks}
    known = [rank for rank in ranks if steps[rank]]
    if not known:
        return {}
    found: dict[str, float] = {}

    def add(name: str, seconds: Iterable[float]) -> None:
        found[name] = found.get(name, 0.0) + fmean(seconds)

    for name in ("forward", "backward", "update"):
        add(name, (_computed(run, rank, name) / steps[rank] for rank in known))
    for name, shares in (
        ("communication", ("exposed", "waiting")),
        ("bubble", ("bubble",)),
        *((one, (one,)) for one in _ONLY_MEASURED),
    ):
        each = [run.shares[rank] for rank in known]
        add(name, (sum(getattr(s, key) for key in shares) * s.seconds / steps[r]
                   for r, s in zip(known, each, strict=True)))  # fmt: skip
    return found


def _computed(run: RecordedRun, rank: Any, name: str) -> float:
    """Seconds of all steps in which a rank computes `name`: its share of what it computes."""
    lengths: dict[str, int] = {}
    for span in run.trained(rank):
        if span.kind in trace.COMPUTE:
            known = _OF_SPAN[span.kind]
            lengths[known] = lengths.get(known, 0) + span.end_ns - span.start_ns
    shares = run.shares[rank]
    computing_s = shares.computing * shares.seconds
    return computing_s * lengths.get(name, 0) / max(1, sum(lengths.values()))
