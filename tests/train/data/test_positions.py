"""Several loops over job.batches, and loops that are left early, go on where they were."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shoal.comm.executors.solo import solo_group
from shoal.errors import CheckpointError
from shoal.train.data.loop_place import Place, place_of_caller
from shoal.train.data.position import Positions, positions_of
from shoal.train.data.sampling import BatchOptions, BatchSplit
from shoal.train.data.stream import BatchStream
from shoal.train.job import Job
from tests.jobs import losses
from tests.models import samples
from tests.train.data.test_batches import stream, weighted, weighted_by_a_generator

Loops = Callable[[Job], Iterator[Any]]


def broken_epochs(job: Job) -> Iterator[Any]:
    """Each epoch ends after two of its three batches."""
    for _ in range(3):
        for batch in job.batches(samples(25), 10):
            yield batch
            if job.steps % 2 == 0:
                break


def broken_in_the_second_epoch(job: Job) -> Iterator[Any]:
    for batch in job.batches(samples(25), 10, epochs=5):
        yield batch
        if job.steps == 4:
            break
    yield from job.batches(samples(25), 10)


def own_epochs(job: Job) -> Iterator[Any]:
    for _ in range(3):
        yield from job.batches(samples(25), 10)


def two_after_each_other(job: Job) -> Iterator[Any]:
    yield from job.batches(samples(20), 10, epochs=2)
    yield from job.batches(samples(24, seed=4), 6)


def two_in_turns(job: Job) -> Iterator[Any]:
    """Epochs of three and of two batches, which begin at different times."""
    first = job.batches(samples(25), 10, epochs=3)
    second = job.batches(samples(16, seed=4), 8, epochs=4)
    return itertools.chain.from_iterable(zip(first, second, strict=False))


def a_loader_that_draws(job: Job) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(samples(25), batch_size=10, shuffle=True, generator=generator)
    for _ in range(2):
        for batch in job.batches(loader, epochs=2):
            yield batch
            if job.steps % 5 == 0:
                break


class Stateful:
    """Batches that know their position, as a StatefulDataLoader does."""

    def __init__(self) -> None:
        self.at = 0
        self.fetched = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[Any]:
        while self.at < 3:
            self.at += 1
            self.fetched += 1
            yield samples(10, seed=self.at).tensors
        self.at = 0


def test_data_with_a_state_goes_on_by_itself(tmp_path: Path) -> None:
    for save_at in (2, 3, 5):
        whole = losses(lambda job: job.batches(Stateful(), epochs=3), tmp_path, save_at)
        data = Stateful()
        again = losses(lambda job, d=data: job.batches(d, epochs=3), tmp_path, None, load=True)
        assert again == whole[save_at:]
        assert data.fetched == len(again), "nothing is fetched twice"


@pytest.mark.parametrize(
    ("loops", "saves"),
    [
        (own_epochs, [1, 3, 4, 8, 9]),
        (broken_epochs, [1, 3, 5]),
        (broken_in_the_second_epoch, [2, 3, 5, 6]),
        (two_after_each_other, [1, 4, 5, 8]),
        (two_in_turns, [2, 4, 6, 8, 14]),
        (a_loader_that_draws, [2, 3, 4, 6, 9]),
        *((loops, [1, 3, 5, 8]) for loops in (weighted, weighted_by_a_generator, stream)),
    ],
)
def test_a_run_goes_on_in_place(tmp_path: Path, loops: Loops, saves: list[int]) -> None:
    for save_at in saves:
        whole = losses(loops, tmp_path, save_at)
        assert losses(loops, tmp_path, None, load=True) == whole[save_at:], save_at


def test_many_loops_take_little_space() -> None:
    positions = Positions(1000)
    data = object()
    for epoch in range(1001):
        loop = positions.add(Place("train 1", (epoch,)), data)
        loop.batches, loop.is_over = 7, epoch < 1000
    assert (document := positions.document()) == {
        "epochs": 1000,
        "loops": [[1000, 7], [1, 7, 0, 0, 0, 0]],
        "data": {},
        "places": {"0": ["train 1", (0,), []], "1000": ["train 1", (1000,), [[1000, 7]]]},
        "turn": None,
        "lines": [],
    }
    assert positions_of(document).document() == document


@pytest.mark.parametrize(
    "document",
    [
        None,
        {"epochs": 1},
        {"epochs": 1, "loops": [3]},
        {"epochs": 1, "loops": [[1, -1]]},
        {"epochs": 1, "loops": [[10**11, 1]]},
        {"epochs": "1", "loops": []},
    ],
)
def test_a_position_that_is_none_is_refused(document: Any) -> None:
    with pytest.raises(CheckpointError, match="position in the data"):
        positions_of(document)


def test_loops_that_end_at_a_step_are_passed_over_as_they_were_trained() -> None:
    """A worker that comes back at step 7 goes on where the others are, in the same order."""

    def batches_of(stream: BatchStream, counted: list[int]) -> list[list[int]]:
        seen = []
        for steps in (3, 9):
            options = BatchOptions(2, epochs=100, steps=steps)
            for batch in stream.batches(TensorDataset(torch.arange(4)), BatchSplit(), options):
                seen.append(batch[0].tolist())
                counted[0] += 1
        return seen

    def stream_of(counted: list[int]) -> BatchStream:
        cpu = torch.device("cpu")
        alone = solo_group()
        return BatchStream(alone, alone, cpu, 5, lambda: counted[0], lambda batch: None)

    counted = [0]
    everything = batches_of(stream_of(counted), counted)
    assert len(everything) == 9
    for present in range(10):
        counted = [present]
        stream = stream_of(counted)
        stream.restore(present, None)
        assert batches_of(stream, counted) == everything[present:]
        assert stream.steps_passed == 9


class Caller:
    """Records from where it is asked for batches."""

    def __init__(self) -> None:
        self.found: list[Place] = []

    def batches(self, *data: Any) -> list[int]:
        self.found.append(place_of_caller(Caller.train.__code__))
        return [0]

    def train(self, function: Callable[[Any], Any]) -> list[Place]:
        function(self)
        return [Place("/".join(p.site.split("/")[1:-1]), p.counters) for p in self.found]


def one_line(job: Any) -> None:
    for epoch in range(3, 5):
        for batch in job.batches(epoch):
            print(batch)


def numbered(job: Any) -> None:
    for i, _ in enumerate("ab"):
        try:
            for _ in job.batches(
                i,
            ):
                break
        finally:
            job.batches()


def until(job: Any) -> None:
    while job.found[1:] == []:
        list(job.batches())


def called(job: Any) -> None:
    def batches_of(epoch: int) -> Iterator[int]:
        yield from job.batches(epoch)

    for epoch in range(2):
        for _ in batches_of(epoch):
            pass


@pytest.mark.parametrize(
    ("function", "places"),
    [
        (one_line, [("one_line 1", 3), ("one_line 1", 4)]),
        (numbered, [("numbered 1", 0), ("numbered 2", 0), ("numbered 1", 1), ("numbered 2", 1)]),
        (until, [("until 1", None), ("until 1", None)]),
        (called, [("called 1/batches_of 1", 0), ("called 1/batches_of 1", 1)]),
    ],
)
def test_a_loop_is_known_by_its_place(
    function: Callable[[Any], Any], places: list[tuple[str, int | None]]
) -> None:
    assert Caller().train(function) == [Place(site, (turn,)) for site, turn in places]


def test_a_place_says_which_call_of_its_function_it_is() -> None:
    assert Place("called 1/batches_of 2").call == "call 2 in batches_of"
