"""Microseconds a batch: `job.batches` and torch's DataLoader with the same number of workers.

Nothing trains: every batch is fetched and dropped. Both shuffle, and run epochs in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import shoal
from benchmarks.harness import (
    beside_peer,
    measure_in_workers,
    options_of_worker,
    peer_cells,
    say,
    write_result,
)
from shoal.commands.launching import config_for, strategy_for
from shoal.commands.output import plain_table

_FEATURES = 32


class Rows(Dataset[tuple[Tensor, int]]):
    """A dataset in Python, whose samples take some time: a loop of so many turns."""

    def __init__(self, samples: int, turns: int = 0, noise: bool = False):
        self.rows = torch.randn(samples, _FEATURES)
        self.turns = turns
        self.noise = noise

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        total = 0
        for turn in range(self.turns):
            total += turn
        row = self.rows[index]
        return (row + torch.randn(_FEATURES) if self.noise else row), total % 10


def stack(samples: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return torch.stack([row for row, _ in samples]), torch.tensor([label for _, label in samples])


class Case(NamedTuple):
    make: Callable[[int], Dataset[Any]]
    collate: Callable[[Any], Any] | None = None


CASES = {
    "TensorDataset": Case(lambda n: TensorDataset(torch.randn(n, _FEATURES), torch.zeros(n))),
    "Python, cheap": Case(Rows),
    "Python, collate": Case(Rows, stack),
    "Python, 1,000 turns": Case(lambda n: Rows(n, 1000)),
    "Python, noise": Case(lambda n: Rows(n, 0, True)),
}


def _seconds(batches: Iterable[Any]) -> float:
    start_s = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - start_s


def measure(job: shoal.Job, samples: int, batch_size: int, rounds: int) -> list[Any]:
    found = []
    for name, case in CASES.items():
        data, collate = case.make(samples), case.collate
        for workers in (0, 2):
            times: dict[str, list[float]] = {"shoal": [], "peer": []}
            for number in range(rounds + 1):  # the first one is not counted
                for way in ("shoal", "peer") if number % 2 else ("peer", "shoal"):
                    batches: Iterable[Any] = DataLoader(
                        data, batch_size, shuffle=True, num_workers=workers, collate_fn=collate
                    )
                    if way == "shoal":
                        batches = job.batches(data, batch_size, collate=collate, loaders=workers)
                    us = 1e6 * _seconds(batches) * batch_size / samples
                    times[way] += [us] if number else []
            found.append({"case": name, "workers": workers, **beside_peer(times)})
    return found


def run(samples: int, batch_size: int, rounds: int) -> Any:
    say(f"fetching {samples} samples in batches of {batch_size}")
    asked = {"samples": samples, "batch-size": batch_size, "rounds": rounds}
    config = config_for(strategy_for("single", 1), device="cpu")
    return measure_in_workers("benchmarks.data", asked, 1, config)


def table_of(results: Sequence[Any]) -> Table:
    heads = ["dataset", "workers", "shoal", "DataLoader", "DataLoader /\nshoal"]
    rows = [[r["case"], str(r["workers"]), *peer_cells(r)] for r in results]
    return plain_table("µs a batch: median (quartiles)", heads, rows, left=1)


if __name__ == "__main__":
    args = options_of_worker(samples=int, batch_size=int, rounds=int)
    write_result(lambda job: measure(job, args.samples, args.batch_size, args.rounds), args.result)
