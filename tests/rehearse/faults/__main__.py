"""Run many seeds in several processes, and print what came of them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter, defaultdict
from pprint import pprint

from tests.rehearse.faults.processes import Result, run_all

COMMAND = "python -m tests.rehearse.faults --seed"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rehearse.faults")
    parser.add_argument("--seeds", metavar="A:B", type=seed_range, default="0:1000")
    parser.add_argument("--seed", type=int, help="one seed, with what it draws")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, help="begin no seed after so long")
    parser.add_argument("--planted", help="with a mistake of planted.py")
    asked = parser.parse_args()
    if asked.seed is not None:
        return show_one(asked.seed, asked.planted)
    seeds = asked.seeds
    summary = Summary()
    began_s = time.monotonic()
    for count, result in enumerate(run_all(seeds, asked.processes, asked.planted), 1):
        summary.add(result)
        if not result[2]:
            print(f"seed {result[0]}: {result[1]}: {result[3]}\n    {COMMAND} {result[0]}")
        if count % 100 == 0:
            took_s = time.monotonic() - began_s
            print(f"{count} of {len(seeds)} seeds in {took_s:.0f} s", flush=True)
        if asked.minutes is not None and time.monotonic() - began_s > 60 * asked.minutes:
            break
    print(summary.shown())
    return 1 if summary.failed else 0


def seed_range(text: str) -> range:
    first, _, last = text.partition(":")
    seeds = range(int(first), int(last))
    if not seeds:
        raise ValueError("no seed")
    return seeds


def show_one(seed: int, planted: str | None) -> int:
    from tests.rehearse.faults.outcome import run
    from tests.rehearse.faults.planted import planted_mistake
    from tests.rehearse.faults.scenario import draw

    scenario = draw(seed)
    pprint(scenario, sort_dicts=False)
    with planted_mistake(planted):
        outcome = run(scenario)
    print(f"{outcome.ending} after {outcome.seconds:.3f} virtual seconds: {outcome.said}")
    return 0 if outcome.is_good else 1


class Summary:
    """Endings by strategy, and by fault."""

    def __init__(self) -> None:
        self.failed: list[int] = []
        self._by_strategy = defaultdict[str, Counter[str]](Counter)
        self._by_fault = defaultdict[str, Counter[str]](Counter)

    def add(self, result: Result) -> None:
        from tests.rehearse.faults.scenario import draw

        seed, ending, is_good, _ = result
        scenario = draw(seed)
        if not is_good:
            self.failed.append(seed)
        self._by_strategy[scenario.kind.strategy][ending] += 1
        for name in scenario.fault_names:
            self._by_fault[name][ending] += 1

    def shown(self) -> str:
        total = sum(self._by_strategy.values(), Counter())
        endings = sorted(total)
        width = max(map(len, [*self._by_strategy, *self._by_fault, "all"]), default=0)
        lines = []

        def line(name: str, counts: Counter[str]) -> None:
            lines.append(f"{name:{width}}" + "".join(f"{counts[e] or '':>10}" for e in endings))

        for title, table in (("strategy", self._by_strategy), ("fault", self._by_fault)):
            lines.append(f"{title:{width}}" + "".join(f"{ending:>10}" for ending in endings))
            for name in sorted(table):
                line(name, table[name])
            lines.append("")
        line("all", total)
        failed = f"failed: {self.failed}" if self.failed else "none failed"
        return "\n".join([*lines, f"{sum(total.values())} seeds, {failed}"])


if __name__ == "__main__":
    sys.exit(main())
