from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.train.evaluate import SampleAssignment


def assigned(samples: int, ranks: tuple[int, ...], batch_size: int) -> SampleAssignment:
    return SampleAssignment(torch.arange(samples), ranks, batch_size)


def test_a_lost_rank_of_three() -> None:
    first = assigned(12, (0, 1, 2), 6)  # batches 0-5 and 6-11, two samples for each rank
    assert [first.samples_of(rank).tolist() for rank in (0, 1, 2)] == [
        [0, 1, 6, 7],
        [2, 3, 8, 9],
        [4, 5, 10, 11],
    ]
    second = first.without([1])
    assert (second.samples.tolist(), second.ranks) == ([2, 3, 8, 9], (0, 2))
    assert [second.samples_of(rank).tolist() for rank in (0, 2)] == [[2, 3], [8, 9]]


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 20), st.data())
def test_every_sample_is_evaluated_once_after_any_losses_in_any_round(
    samples: int, ranks: int, batch_size: int, data: st.DataObject
) -> None:
    now = assigned(samples, tuple(range(ranks)), batch_size)
    done: list[int] = []
    while len(now.samples):
        missing = data.draw(st.sets(st.sampled_from(now.ranks), max_size=len(now.ranks) - 1))
        for rank in set(now.ranks) - missing:
            done += now.samples_of(rank).tolist()
        now = now.without(missing)
    assert sorted(done) == list(range(samples))


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 20))
def test_the_batches_of_a_rank_hold_its_samples(samples: int, ranks: int, batch_size: int) -> None:
    numbers = torch.arange(samples)
    data = torch.utils.data.TensorDataset(numbers, numbers)
    now = assigned(samples, tuple(range(ranks)), batch_size)
    for rank in range(ranks):
        found: list[int] = []
        for batch in now.batches(data, rank):
            inputs = batch[0]
            assert isinstance(inputs, torch.Tensor)
            found += inputs.tolist()[: batch.microbatch_sizes[0]]
        assert found == now.samples_of(rank).tolist()


def test_a_rank_without_samples_is_an_error() -> None:
    with pytest.raises(ValueError):
        assigned(4, (0, 2), 2).samples_of(1)
