"""A rehearsal beside the run: the same script in a lab, for real and in virtual seconds.

The lab is built before (`shoal lab up`); hogwild does not run there.
Strategies take turns, `rounds` times; the rehearsals follow on the machine that the runs have left
alone. `--measure` measures the passes of as many workers as the lab has, all computing at once on
the cores that its hosts share.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness import say
from shoal.commands.output import plain_table
from shoal.errors import ShoalError
from shoal.launch.lab.lab import find_lab
from shoal.observe.comparison import ComparedRun, outcome_from

PACED = "benchmarks/paced.py"
STRATEGIES = (
    "ddp",
    "ps",
    "ps(quorum=0.75)",
    "ps(staleness=2)",
    "ps(mode='async')",
    "gossip(graph='ring')",
    "gossip(graph='ring', mode='async')",
    "localsgd(every=16)",
    "localsgd(every=16, outer='nesterov(lr=0.7)')",
)
_LIMIT_S = 600.0


def run(
    names: Sequence[str], words: Sequence[str], slow: str, until: float | None, rounds: int
) -> list[dict[str, Any]]:
    lab = find_lab(None)
    workers = lab.design.hosts
    faults = ["--slow", slow] if slow else []
    of_run = [*faults, *words]
    if words[0] == PACED:  # `--slow` of a run lasts by processor time, and it takes none
        of_run = [*words, "--slow", slow.rstrip("x")] if slow else [*words]
    real: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            real[name].append(_run(name, workers, of_run, until))
            say(f"round {number + 1}: {name}: {real[name][-1]['ms']:.1f} ms a step")
    say("rehearsing")
    rehearsed = _rehearse(names, workers, faults, words, until)
    return [{"strategy": name, "real": real[name], "rehearsed": rehearsed[name]} for name in names]


def _run(name: str, workers: int, words: Sequence[str], until: float | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        options = ["--on", "lab", "-n", str(workers), "-s", name, "--record", str(record)]
        _shoal("run", *options, "--plain", *words)
        report = json.loads((record / "report.json").read_text())
    run_of = ComparedRun(0, name, workers, "")
    return _figures(outcome_from(run_of, report["ranks"], {}, None, (), until).to_json())


def _rehearse(
    names: Sequence[str],
    workers: int,
    faults: Sequence[str],
    words: Sequence[str],
    until: float | None,
) -> dict[str, dict[str, Any]]:
    asked = [word for name in names for word in ("-s", name)]
    target = [] if until is None else ["--until", f"loss={until}"]
    options = ["-n", str(workers), "--cluster", "lab", "--measure", "--json", *target, *faults]
    document = json.loads(_shoal("rehearse", *options, *asked, *words))
    return {name: _figures(one) for name, one in zip(names, document["runs"], strict=True)}


def _shoal(*words: str) -> str:
    command = [sys.executable, "-m", "shoal", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise ShoalError(f"{' '.join(words)} failed:\n{done.stderr}{done.stdout}")
    return done.stdout


def _figures(outcome: dict[str, Any]) -> dict[str, Any]:
    rate = outcome["steps_per_s"]
    return {
        "ms": 1e3 / rate if rate else None,
        "until_s": outcome["until_s"],
        "staleness": outcome["staleness"],
        "loss": outcome["loss"],
    }


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    heads = ["strategy", "ms a step", "rehearsed", "ratio", "s to loss", "rehearsed", "staleness"]
    heads += ["rehearsed", "loss", "rehearsed"]
    rows = []
    for result in results:
        found, guess = result["real"], result["rehearsed"]
        ms = _median(found, "ms")
        ratio = "" if not ms or not guess["ms"] else f"{guess['ms'] / ms:.2f}"
        cells = [result["strategy"], _shown(ms), _shown(guess["ms"]), ratio]
        for key in ("until_s", "staleness", "loss"):
            cells += [_shown(_median(found, key)), _shown(guess[key])]
        rows.append(cells)
    return plain_table("in the lab, and rehearsed", heads, rows, left=1)


def _median(found: Sequence[dict[str, Any]], key: str) -> float | None:
    known = [one[key] for one in found if one[key] is not None]
    return statistics.median(known) if known else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
