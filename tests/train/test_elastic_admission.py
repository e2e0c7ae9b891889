"""Workers that are lost while the state is copied to a newcomer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm.board import GroupMember
from shoal.train.job import Job
from tests.elastic import (
    BATCH,
    EPOCHS,
    Return,
    Workers,
    alone,
    exact_step,
    numbered,
    wait_for_request,
)
from tests.train.test_elastic_training import accuracy
from tests.train.test_elastic_zero import STAGES, assert_same_bits, undisturbed

UPDATED_IN = 7  # the step
NEWCOMER, SENDER, OTHER = GroupMember(1, 1), GroupMember(0, 0), GroupMember(2, 0)
ADMITTING = 3  # the generation: 1 has all workers, 2 is without worker 1
WHOLE = pytest.mark.whole


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return undisturbed(tmp_path_factory.mktemp("alone"))


def run(
    folder: Path, strategy: str, wanted: Any, lost: GroupMember, call: int, when: str
) -> Workers:
    returning = Return()

    def train(workers: Workers, job: Job) -> list[float]:
        step = exact_step(job)
        losses = []
        for batch in job.batches(numbered(), BATCH, epochs=EPOCHS):
            losses.append(float(step(batch)))
            if job.steps % 4 == 0:
                losses.append(round(job.evaluate(accuracy, numbered()), 9))
            returning.wait(job)
        job.save(workers.folder / "saved")
        return wanted[0] if returning.is_late(job) else losses

    workers = Workers(
        folder,
        4,
        train,
        strategy,
        dies={GroupMember(1, 0): (5, "before")},
        dies_in={lost: (ADMITTING, call, when)},
    )
    workers.run(lambda: returning.come_back(workers))
    return workers


@pytest.mark.parametrize("lost", [NEWCOMER, SENDER, OTHER])
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp(elastic=True)", marks=WHOLE),
        *(pytest.param(text, marks=WHOLE) for text in STAGES[:2]),
        STAGES[2],
    ],
)
def test_a_loss_while_a_newcomer_gets_the_state_changes_no_bit(
    tmp_path: Path,
    wanted: Any,
    strategy: str,
    lost: GroupMember,
    request: pytest.FixtureRequest,
) -> None:
    is_whole = request.config.getoption("--whole")
    for call in range(14) if is_whole else (4,):
        for when in ("before", "after") if is_whole else ("before",):
            folder = tmp_path / f"{call}-{when}"
            folder.mkdir()
            workers = run(folder, strategy, wanted, lost, call, when)
            assert lost.worker not in workers.results or lost.worker == 1
            assert set(workers.results) >= {0, 2, 3} - {lost.worker}
            assert_same_bits(workers, wanted)


def test_a_newcomer_gets_the_averages_of_whole_steps(tmp_path: Path) -> None:
    """It asks to join when worker 2 is lost, which has updated and not sent its weights yet."""
    comes = threading.Event()

    def train(workers: Workers, job: Job) -> list[Tensor]:
        step = exact_step(job)
        ema = job.ema(step.model, 0.5)
        if job.rank == 2:
            spread = step.sync.sharded.spread

            def die_before() -> None:
                if step.update.steps == UPDATED_IN:
                    comes.set()
                    wait_for_request(job)
                    workers.die()
                spread()

            step.sync.sharded.spread = die_before
        for batch in job.batches(numbered(), BATCH, epochs=EPOCHS):
            step(batch)
            ema.update()
        return [average.clone() for average in ema.averages]

    def come_back() -> None:
        assert comes.wait(60)
        workers.live(1, 1)

    dies = {GroupMember(1, 0): (5, "before")}
    workers = Workers(tmp_path, 4, train, "zero(2, elastic=True)", dies=dies)
    workers.run(come_back)
    wanted = alone(train, tmp_path)
    assert sorted(workers.results) == [0, 1, 3]
    assert all(all(map(torch.equal, r, wanted)) for r in workers.results.values())
