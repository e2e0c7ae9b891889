"""A table of real models under strategies: `python -m tests.models [--models bert,t5] [--json F]`.

Each cell is one `shoal verify` with 3 steps. It is "equal"; or "refused", and the sentence stands
below the table; all else is "WRONG" and the exit status is 1. With `--quick` ranks are threads and
a cell takes seconds (`quick.py`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.errors import StrategyError
from shoal.strategy.strategy import Strategy, parse
from tests.models.catalog import CATALOG
from tests.models.quick import run_forked

STRATEGIES = ["ddp", "zero(3)", "ps", "pp(2)", "tp(2)", "ddp + tp(2) + pp(2)"]
SCRIPT = Path(__file__).with_name("train.py")


@dataclass(frozen=True)
class Cell:
    """How one model did under one strategy."""

    model: str
    strategy: str
    verdict: str  # equal, refused, WRONG, CRASH, HANG
    sentence: str = ""


def workers(text: str) -> int:
    """Enough for two replicas, or for one where the strategy does not say how they agree."""
    strategy = parse(text)
    needed = 1 if strategy.sync is None else 2
    fits = (n for n in (2, 4, 8, 16) if replicas(strategy, n) >= needed)
    return next(fits)


def replicas(strategy: Strategy, n: int) -> int:
    try:
        return strategy.layout(n).replicas
    except StrategyError:
        return 0


def verify(model: str, strategy: str, timeout_s: float) -> Cell:
    words = [sys.executable, "-m", "shoal", "verify", str(SCRIPT), "-n", str(workers(strategy))]
    words += ["-s", strategy, "--steps", "3", "--device", "cpu", "--", model]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Cell(model, strategy, "HANG")
    lines = (done.stdout + done.stderr).strip().splitlines()
    last = lines[-1] if lines else ""
    if done.returncode == 0:
        return Cell(model, strategy, "equal")
    if done.returncode == 2 and "Traceback" not in done.stderr:
        return Cell(model, strategy, "refused", last)
    return Cell(model, strategy, "WRONG" if done.returncode == 1 else "CRASH", last)


def quick(model: str, strategy: str, timeout_s: float) -> Cell:
    verdict, sentence = run_forked(model, strategy, workers(strategy), timeout_s)
    return Cell(model, strategy, verdict, sentence)


def table(cells: list[Cell]) -> str:
    strategies = list(dict.fromkeys(cell.strategy for cell in cells))
    by_key = {(cell.model, cell.strategy): cell.verdict for cell in cells}
    models = list(dict.fromkeys(cell.model for cell in cells))
    width = max(map(len, models))
    lines = [" " * width + "  " + "  ".join(strategies)]
    for model in models:
        verdicts = [by_key[model, s].ljust(len(s)) for s in strategies]
        lines.append("  ".join([model.ljust(width), *verdicts]))
    return "\n".join(lines)


def sentences(cells: list[Cell]) -> str:
    return "\n".join(
        f"{cell.model} under {cell.strategy}: {cell.verdict}: {cell.sentence}"
        for cell in cells
        if cell.verdict != "equal"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("--models", help="names, with commas between them (default: all)")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--jobs", type=int, default=1, help="how many run at the same time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one of them")
    parser.add_argument("--quick", action="store_true", help="ranks are threads of one process")
    parser.add_argument("--json", type=Path, help="a file for the cells")
    args = parser.parse_args()
    models = args.models.split(",") if args.models else list(CATALOG)
    pairs = [(model, str(parse(text))) for model in models for text in args.strategies]

    def run(pair: tuple[str, str]) -> Cell:
        cell = (quick if args.quick else verify)(*pair, args.timeout)
        print(f"{cell.model}, {cell.strategy}: {cell.verdict}", file=sys.stderr, flush=True)
        return cell

    with ThreadPoolExecutor(args.jobs) as pool:
        cells = list(pool.map(run, pairs))
    if args.json:
        args.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
    print(f"{table(cells)}\n\n{sentences(cells)}")
    return int(any(cell.verdict not in ("equal", "refused") for cell in cells))


if __name__ == "__main__":
    raise SystemExit(main())
