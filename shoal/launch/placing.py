"""Which ranks are on which host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import BadInput
from shoal.launch.machines import Machine


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
    placed: list[PlacedRanks] = []
    first = 0
    for machine in machines:
        count = min(machine.slots, workers - first)
        if count > 0:
            placed.append(PlacedRanks(machine, first, count))
            first += count
    if first < workers:
        hosts = "1 host" if len(machines) == 1 else f"{len(machines)} hosts"
        raise BadInput(f"there are slots for {first} workers on {hosts}, not for {workers}")
    return placed
