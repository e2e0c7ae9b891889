"""How a benchmark runs in workers, and shows its results."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import shoal
from shoal.commands.launching import run_quietly
from shoal.errors import BadInput
from shoal.observe.calibration.kernels import timed
from shoal.runtime.config import RunConfig
from shoal.runtime.files import scratch_folder

FASTER = "peer / shoal above 1: Shoal is faster"


def measure_in_workers(
    module: str,
    options: Mapping[str, object],
    workers: int,
    config: RunConfig,
    run: Callable[[list[str], int, RunConfig], None] = run_quietly,
) -> Any:
    """The result that workers of `python -m module` write, run with these options."""
    with scratch_folder("bench") as folder:
        result = folder / "result.json"
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        run([sys.executable, "-m", module, *words, "--result", str(result)], workers, config)
        return json.loads(result.read_text())


def alternate(
    ways: Mapping[str, Callable[[], Any]],
    rounds: int,
    steps: int | Mapping[str, int],
    before_round: Callable[[], None] = lambda: None,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Time `steps` calls of each way in turn, `rounds` times; milliseconds per call, by way.

    `steps` may differ between ways. The order is reversed every round, so that no way is always
    first. A first round is not timed.
    """
    times_ms: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        names = list(ways) if round_ % 2 else list(ways)[::-1]
        for name in names:
            calls = steps if isinstance(steps, int) else steps[name]
            before_round()
            took_s = timed(ways[name], calls, after_round)
            if round_:
                times_ms[name].append(took_s * 1e3)
    return times_ms


def options_of_worker(**types: type) -> argparse.Namespace:
    """What `measure_in_workers` has given to this process."""
    return worker_parser(**types).parse_args()


def worker_parser(**types: type) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    for name, kind in {**types, "result": Path}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True)
    return parser


def write_result(measure: Callable[[shoal.Job], Any], result: Path) -> None:
    """Train with `measure` for a loop; rank 0 writes what it returns."""

    def train(job: shoal.Job) -> None:
        found = measure(job)
        if job.rank == 0:
            result.write_text(json.dumps(found))

    shoal.run(train)


def say(what: str) -> None:
    """Print to stderr what is being measured."""
    print(what, file=sys.stderr, flush=True)


def check_names(option: str, given: Iterable[str], known: Collection[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise BadInput(f"{option} takes {', '.join(known)}, not {', '.join(unknown)}")


@dataclass(frozen=True)
class Timing:
    """Milliseconds per step: the median over rounds, and its quartiles."""

    median_ms: float
    low_ms: float
    high_ms: float

    @classmethod
    def of(cls, rounds_ms: list[float]) -> Timing:
        if len(rounds_ms) < 2:
            return cls(rounds_ms[0], rounds_ms[0], rounds_ms[0])
        low, median, high = statistics.quantiles(rounds_ms, n=4)
        return cls(median, low, high)


def beside_peer(times_ms: Mapping[str, list[float]]) -> dict[str, Any]:
    """Shoal's and the peer's time, and the ratio of the peer's to Shoal's, round by round."""
    medians: dict[str, Any] = {"shoal": asdict(Timing.of(times_ms["shoal"]))}
    if "peer" in times_ms:
        pairs = zip(times_ms["shoal"], times_ms["peer"], strict=True)
        ratio = Timing.of([theirs / ours for ours, theirs in pairs])  # without a unit
        medians["theirs"] = asdict(Timing.of(times_ms["peer"]))
        medians["ratio"] = {"median": ratio.median_ms, "low": ratio.low_ms, "high": ratio.high_ms}
    return medians


def peer_cells(found: Mapping[str, Any]) -> list[str]:
    """The cells of `beside_peer`."""
    if "theirs" not in found:
        return [spread(found["shoal"], "_ms"), "", ""]
    times = [spread(found[name], "_ms") for name in ("shoal", "theirs")]
    return [*times, spread(found["ratio"], "")]


def spread(timing: Mapping[str, float], unit: str) -> str:
    """A median, and below it its quartiles, with four digits."""
    median, low, high = (f"{timing[key + unit]:.4g}" for key in ("median", "low", "high"))
    return f"{median}\n({low}–{high})"
