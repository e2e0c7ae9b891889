"""A worker that fails or ends early under a parameter server ends the others at once."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.comm.group import Group
from shoal.errors import ShoalError
from tests.conftest import World
from tests.models import samples
from tests.splitting import job_of, mlp


class _Mine(Exception):
    pass


@pytest.mark.parametrize("strategy", ['ps(placement="rank0")', 'ps(placement="rank0", quorum=1)'])
@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_a_worker_is_what_is_seen(world: World, strategy: str, failing: int) -> None:
    def train(group: Group) -> None:
        with job_of(group, strategy, mlp()) as (job, step):
            for number, batch in enumerate(job.batches(samples(32), 8)):
                if number == 1 and group.rank == failing:
                    raise _Mine
                step(batch)

    with pytest.raises(_Mine):
        world(2, train)


@pytest.mark.parametrize("early", [0, 1])
def test_a_worker_that_takes_fewer_steps_is_named(world: World, early: int) -> None:
    def train(group: Group) -> Any:
        with job_of(group, 'ps(placement="rank0")', mlp()) as (job, step):
            for number, batch in enumerate(job.batches(samples(32), 8)):
                if number == 2 and group.rank == early:
                    break
                step(batch)

    with pytest.raises(ShoalError, match=f"worker {early} has ended its training after 2 steps"):
        world(2, train)
