"""A table of real models under strategies: `python -m tests.models [--models bert,t5] [--json F]`.

Each cell is one `shoal verify` with 3 steps. It is "equal"; or "refused", and the sentence stands
below the table; or its library is "not installed"; all else is "WRONG" and the exit status is 1.
With `--quick` ranks are threads and a cell takes seconds (`quick.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.strategy.strategy import parse
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
    sizes = (each.size for each in (strategy.tp, strategy.pp, strategy.ep, strategy.cp) if each)
    return math.prod(sizes, start=1 if strategy.sync is None else 2)


def verify(model: str, strategy: str, timeout_s: float) -> Cell:
    words = [sys.executable, "-m", "shoal", "verify", "-n", str(workers(strategy))]
    words += ["-s", strategy, "--steps", "3", "--device", "cpu", str(SCRIPT), model]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Cell(model, strategy, "HANG")
    last = (done.stdout + done.stderr).strip().rpartition("\n")[2]
    is_refused = done.returncode == 2 and "Traceback" not in done.stderr
    verdict = "refused" if is_refused else {0: "equal", 1: "WRONG"}.get(done.returncode, "CRASH")
    verdict = "not installed" if "No module named" in last else verdict
    return Cell(model, strategy, verdict, last)


def quick(model: str, strategy: str, timeout_s: float) -> Cell:
    return Cell(model, strategy, *run_forked(model, strategy, workers(strategy), timeout_s))


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
    strategies = [str(parse(text)) for text in args.strategies]

    def run(pair: tuple[str, str]) -> Cell:
        cell = (quick if args.quick else verify)(*pair, args.timeout)
        print(f"{cell.model}, {cell.strategy}: {cell.verdict}", file=sys.stderr, flush=True)
        return cell

    with ThreadPoolExecutor(args.jobs) as pool:
        cells = list(pool.map(run, [(model, text) for model in models for text in strategies]))
    if args.json:
        args.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1))
    width = max(map(len, models))
    print(" " * width, *strategies, sep="  ")
    for model in models:
        row = [cell.verdict.ljust(len(cell.strategy)) for cell in cells if cell.model == model]
        print(model.ljust(width), *row, sep="  ")
    for cell in cells:
        if cell.verdict != "equal":
            print(f"{cell.model} under {cell.strategy}: {cell.verdict}: {cell.sentence}")
    fine = ("equal", "refused", "not installed")
    return int(any(cell.verdict not in fine for cell in cells))


if __name__ == "__main__":
    raise SystemExit(main())
