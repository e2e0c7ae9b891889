"""The part of a product that `make test` runs covers what the whole product covers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.products import covering


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.booleans())
def test_every_value_or_pair_of_values_occurs(sizes: list[int], pairs: bool) -> None:
    product = [
        {f"axis {i}": str(value) for i, value in enumerate(values)}
        for values in itertools.product(*map(range, sizes))
    ]
    kept = [product[position] for position in covering(product, pairs)]
    strength = 2 if pairs else 1
    for axes in itertools.combinations(product[0], strength):
        everything = {tuple(c[axis] for axis in axes) for c in product}
        assert {tuple(c[axis] for axis in axes) for c in kept} == everything
    if not pairs:
        assert len(kept) == max(sizes)
