"""Training with a user's own schedules gives the result of one worker; wrong ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.executors.scheduled import Scheduled
from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.schedules.collectives.cost import Link
from shoal.train.step.prepare_model import check_same
from shoal.transport.threads import ThreadTransport
from tests.comm.threads import on_threads
from tests.conftest import World
from tests.models import samples
from tests.splitting import assert_equal, gpt, job_of, mlp, next_token_loss, refused, texts
from tests.user_schedules import broken, collectives, pipelines

__all__ = ["broken", "collectives", "pipelines"]  # fixtures


@pytest.mark.parametrize("microbatches", [1, 4, 5])
def test_a_zigzag_pipeline_trains_as_one_worker(
    world: World, pipelines: Path, microbatches: int
) -> None:
    strategy = f'pp(2, schedule="{pipelines}:zigzag", microbatches={microbatches})'
    assert_equal(world, 2, strategy, mlp, samples(24), clip_norm=0.1)


def test_a_zigzag_pipeline_is_exact(world: World, pipelines: Path) -> None:
    strategy = f'pp(2, schedule="{pipelines}:zigzag")'
    assert_equal(world, 2, strategy, mlp, samples(24), exactly=True, exact=True)


def test_a_looped_schedule_trains_with_replicas_and_tied_weights(
    world: World, pipelines: Path
) -> None:
    strategy = f'ddp + pp(2, schedule="{pipelines}:looped", chunks=2)'
    assert_equal(world, 4, strategy, gpt, texts(16), loss=next_token_loss)


@pytest.mark.parametrize("function", ["two_hops", "for_two"])
def test_ddp_over_a_collective_of_the_user_trains_as_one_worker(
    collectives: Path, function: str
) -> None:
    size = 2 if function == "for_two" else 3
    algorithm = f"{collectives}:{function}"
    strategy = f'ddp(algorithm="{algorithm}")'

    def world(size: int, body: Callable[[Group], Any]) -> list[Any]:
        def rank(transport: ThreadTransport) -> Any:
            return body(Group(Scheduled(transport, {"all_reduce": algorithm}, link=Link())))

        return on_threads(size, rank)

    assert_equal(world, size, strategy, mlp, samples(24), clip_norm=0.1)


def test_wrong_pipelines_are_refused_before_the_first_step(
    world: World, pipelines: Path, broken: Path
) -> None:
    def of(schedule: str) -> str:
        return refused(world, 2, f'pp(2, schedule="{schedule}")', mlp, samples(16))

    assert "stage 0 never does B0" in of(f"{pipelines}:forgetful")
    assert "hangs: stage 0 before B0 waits for stage 1" in of(f"{pipelines}:stuck")
    assert "has no function zagzig" in of(f"{pipelines}:zagzig")
    assert "cannot be loaded: ModuleNotFoundError" in of(f"{broken}:zigzag")


def test_a_schedule_that_differs_between_ranks_names_the_ranks(world: World) -> None:
    def body(group: Group) -> None:
        mine = b"zigzag" if group.rank in (0, 2) else b"zagzig"
        check_same(group, "mine.py:zigzag", mine, torch.device("cpu"))

    with pytest.raises(BadInput, match="not the same schedule on all ranks"):
        world(4, body)


def test_the_strategy_of_a_checkpoint_names_the_schedule(
    world: World, pipelines: Path, tmp_path: Path
) -> None:
    strategy = f'pp(2, schedule="{pipelines}:zigzag")'
    models = [mlp() for _ in range(2)]

    def body(group: Group) -> None:
        with job_of(group, strategy, models[group.rank]) as (job, step):
            for batch in job.batches(samples(16), 8):
                step(batch)
            job.save(tmp_path / "saved")

    world(2, body)
    assert f"{pipelines}:zigzag" in (tmp_path / "saved" / "manifest.json").read_text()
