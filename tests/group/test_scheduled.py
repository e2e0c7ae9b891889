from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.errors import BadInput
from shoal.group.group import Group, Op
from shoal.group.scheduled import ScheduledGroup
from shoal.schedules.catalog import algorithms, build, kinds
from shoal.schedules.collective import Collective, Transfer
from shoal.schedules.cost import Link, cheapest
from shoal.schedules.proof import ProofFailed
from tests.group.cases import Case, call, cases, check
from tests.group.threads import on_threads

EVERY = [(kind, name) for kind in kinds() for name in algorithms(kind)]
MANY_RANKS = range(1, 10)


@pytest.mark.parametrize(("kind", "name"), EVERY)
@settings(
    max_examples=4, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_every_algorithm_gives_the_right_numbers_on_1_to_9_ranks(
    kind: str, name: str, data: st.DataObject
) -> None:
    case = data.draw(cases(kind, name))
    for size in MANY_RANKS:
        results = on_threads(size, lambda transport: call(group_for(transport, case), case))
        for rank, got in enumerate(results):
            check(case, got, rank, size)
        if kind == "all_reduce" and build(kind, name, size).same_bits:
            assert all(torch.equal(got, results[0]) for got in results)


def group_for(transport: object, case: Case) -> ScheduledGroup:
    return ScheduledGroup(
        transport, {case.kind: case.algorithm}, segment_bytes=case.segment_bytes  # type: ignore[arg-type]
    )
