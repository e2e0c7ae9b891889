"""Sums that are formed natively, of memory of this process and of others."""

from __future__ import annotations

import pytest
import torch

from shoal.replica.peer_sum import mix

SHARES = [0.1, 0.37, 0.2, 0.3, 0.03]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 31, 33, 300_007, 1_100_007])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_weighted_sum_in_one_pass_has_the_bits_of_torch(
    dtype: torch.dtype, size: int, count: int
) -> None:
    terms = [(torch.randn(size + 1, dtype=dtype)[1:], share) for share in SHARES[:count]]
    guarded = torch.zeros(size + 1, dtype=dtype)
    if not mix(guarded[:size], terms):
        pytest.skip("no native part, or a processor without fused multiply-add")
    (first, share), *rest = terms
    expected = first * share
    for term, share in rest:
        expected.add_(term, alpha=share)
    assert torch.equal(guarded[:size], expected)
    assert guarded[size] == 0


def test_other_types_are_left_to_torch() -> None:
    halves = torch.ones(4, dtype=torch.bfloat16)
    assert not mix(torch.zeros_like(halves), [(halves, 0.5)])
