"""Schedules of a user, right and wrong, as files for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

PIPELINES = '''
from __future__ import annotations

from dataclasses import dataclass

from shoal.schedules.pipelines import Action, ActionKind


@dataclass(frozen=True)
class Pair:  # dataclasses look up the module that defines them
    first: int
    second: int


def zigzag(stages: int, stage: int, microbatches: int) -> list[Action]:
    """Two micro-batches forward, then both backward, the second one first.

        stage 0  F0 F1 ·  ·  ·  B1 B0 F2 F3 …
        stage 1  ·  F0 F1 B1 B0 …
    """
    pairs = [Pair(m, m + 1) for m in range(0, microbatches - 1, 2)]
    actions = []
    for pair in pairs:
        order = (pair.first, pair.second)
        actions += [Action(ActionKind.FORWARD, m) for m in order]
        actions += [Action(ActionKind.BACKWARD, m) for m in reversed(order)]
    if microbatches % 2:
        last = microbatches - 1
        actions += [Action(ActionKind.FORWARD, last), Action(ActionKind.BACKWARD, last)]
    return actions


def looped(stages: int, stage: int, microbatches: int, chunks: int) -> list[Action]:
    every = [(m, c) for c in range(chunks) for m in range(microbatches)]
    forward = [Action(ActionKind.FORWARD, m, c) for m, c in every]
    return forward + [Action(ActionKind.BACKWARD, m, c) for m, c in reversed(every)]


def forgetful(stages: int, stage: int, microbatches: int) -> list[Action]:
    return [Action(ActionKind.FORWARD, m) for m in range(microbatches)]


def stuck(stages: int, stage: int, microbatches: int) -> list[Action]:
    """The last stage wants micro-batch 1 first, the others send it after the backward of 0."""
    order = list(range(microbatches))
    if stage == stages - 1:
        order.reverse()
    return [Action(k, m) for m in order for k in (ActionKind.FORWARD, ActionKind.BACKWARD)]


def thrice(stages: int, stage: int, microbatches: int, chunks: int = 3) -> list[Action]:
    return looped(stages, stage, microbatches, chunks)


def words(*sizes: int) -> list[str]:
    return ["F0", "B0"]


def nothing(*sizes: int) -> None:
    return None


def fails(*sizes: int) -> list[Action]:
    raise ValueError("no\\nidea")


number = 7
'''

COLLECTIVES = '''
from shoal.schedules.collectives import Collective, Transfer


def two_hops(ranks: int) -> Collective:
    """An all-reduce along a line: to the last rank, adding up, and back."""
    there = [(Transfer(r, r + 1, chunk=0, reduce=True),) for r in range(ranks - 1)]
    back = [(Transfer(r, r - 1, chunk=0, reduce=False),) for r in range(ranks - 1, 0, -1)]
    return Collective("two_hops", ranks, 1, there + back)


def half(ranks: int) -> Collective:
    there = [(Transfer(r, r + 1, chunk=0, reduce=True),) for r in range(ranks - 1)]
    return Collective("half", ranks, 1, there)


def for_two(ranks: int) -> Collective:
    return two_hops(2)


def broadcast(ranks: int) -> Collective:
    hops = [(Transfer(r, r + 1, chunk=0, reduce=False),) for r in range(ranks - 1)]
    return Collective("broadcast", ranks, 1, hops, kind="broadcast")


def nothing(ranks: int) -> None:
    return None


def fails(ranks: int) -> None:
    raise ValueError("no\\nidea")
'''


@pytest.fixture
def pipelines(tmp_path: Path) -> Path:
    return _written(tmp_path / "pipelines.py", PIPELINES)


@pytest.fixture
def collectives(tmp_path: Path) -> Path:
    return _written(tmp_path / "collectives.py", COLLECTIVES)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return _written(tmp_path / "broken.py", "import nowhere_at_all\n")


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
