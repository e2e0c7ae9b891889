"""Which ranks are on which host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import BadInput
from shoal.launch.machines import Machine
from shoal.runtime.wording import counted


@dataclass(frozen=True)
class PlacedRanks:
    """Neighbouring ranks on one host."""

    machine: Machine
    first: int
    count: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)


def place(machines: Sequence[Machine], workers: int) -> list[PlacedRanks]:
    """Fill the hosts one after the other; BadInput where there are more workers than slots."""
    counts: list[int] = []
    for machine in machines:
        counts.append(min(machine.slots, workers - sum(counts)))
    if sum(counts) < workers:
        room = f"{counted(sum(counts), 'worker')} on {counted(len(machines), 'host')}"
        raise BadInput(f"there is room for {room}, not for {workers}")
    return _blocks(machines, counts)


def place_evenly(machines: Sequence[Machine], started: int, workers: int) -> list[PlacedRanks]:
    """The first workers evenly over the hosts; those that come later, in the slots that are left.

    For 3 of 6 workers on 3 hosts: ranks 0 | 1 | 2, later 3 | 4 | 5. BadInput as for `place`.
    """
    filled = place(machines, workers)
    if started == workers:
        return filled
    slots = [machine.slots for machine in machines]
    early = _evenly(slots, started)
    late = [most - few for most, few in zip(_evenly(slots, workers), early, strict=True)]
    return [*_blocks(machines, early), *_blocks(machines, late, started)]


def _evenly(slots: Sequence[int], workers: int) -> list[int]:
    """One worker at a time, where the fewest are."""
    counts = [0] * len(slots)
    for _ in range(workers):
        hosts = [host for host, most in enumerate(slots) if counts[host] < most]
        counts[min(hosts, key=lambda host: counts[host])] += 1
    return counts


def _blocks(
    machines: Sequence[Machine], counts: Sequence[int], first: int = 0
) -> list[PlacedRanks]:
    placed: list[PlacedRanks] = []
    for machine, count in zip(machines, counts, strict=True):
        if count > 0:
            placed.append(PlacedRanks(machine, first, count))
            first += count
    return placed
