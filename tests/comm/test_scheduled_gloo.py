from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shoal.schedules.collectives.catalog import algorithms, kinds
from tests.comm.cases import cases
from tests.comm.gloo import GlooWorld
from tests.products import few_or_all

EVERY = [(kind, name) for kind in kinds() for name in algorithms(kind)]


@pytest.fixture(scope="module")
def gloo() -> Iterator[GlooWorld]:
    world = GlooWorld()
    yield world
    world.close()


@pytest.mark.parametrize(("kind", "name"), EVERY)
@settings(
    max_examples=few_or_all(1, 5),
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_every_algorithm_agrees_with_torch_on_gloo(
    gloo: GlooWorld, kind: str, name: str, data: st.DataObject
) -> None:
    gloo.check(data.draw(cases(kind, name)))
