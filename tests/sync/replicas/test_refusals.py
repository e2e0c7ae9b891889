"""What needs every push is refused where the loss of a server may undo some."""

from __future__ import annotations

import pytest

from shoal.errors import BadInput
from tests.conftest import World
from tests.sync.replicas.chained import EXACT, train


def test_exact_sums_need_strong_consistency(world: World) -> None:
    with pytest.raises(BadInput, match=r'exact=True needs every push .* use consistency="strong"'):
        train(world, EXACT, 'ps(replicas=2, consistency="eventual")', 1)
