"""Rows that are copied to their places, by the native call and without it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.embedding import row_copy
from shoal.embedding.row_copy import copy_rows, take_rows

SOURCE = torch.arange(12.0).view(4, 3)


@pytest.fixture(params=["native", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(row_copy, "_native", None)
        monkeypatch.setattr(row_copy, "_native_take", None)
    elif row_copy._native_take is None:
        pytest.skip("the native part is not built")


def test_rows_go_from_any_position_to_any_place() -> None:
    target = torch.zeros(3, 3)
    copy_rows(SOURCE, np.array([3, 1]), target, np.array([0, 2]))
    assert target.tolist() == [[9, 10, 11], [0, 0, 0], [3, 4, 5]]
    copy_rows(SOURCE[:2], None, target, None)
    assert torch.equal(target[:2], SOURCE[:2])


@pytest.mark.parametrize(("origins", "places"), [([4], [0]), ([-1], [0]), ([0], [3]), ([0], [-1])])
def test_a_position_that_is_out_of_range_copies_nothing(
    origins: list[int], places: list[int]
) -> None:
    target = torch.zeros(3, 3)
    with pytest.raises(IndexError):
        copy_rows(SOURCE, np.array([1, *origins]), target, np.array([1, *places]))
    index = np.array([1, 2, 3, 4], np.int32)
    assert not take_rows(
        index, 0, np.array(origins), SOURCE.numpy(), target.numpy(), np.array(places)
    )
    assert not target.any()


def test_rows_are_taken_by_an_index_of_positions() -> None:
    index = np.array([0, 3, 1, -2, 9], np.int32)  # of ids 10 to 14
    target = np.zeros((2, 3), np.float32)
    assert take_rows(index, 10, np.array([12, 11]), SOURCE.numpy(), target, None)
    assert target.tolist() == [[0, 1, 2], [6, 7, 8]]
    for without in (10, 13, 14, 9, 15, -(2**62)):
        assert not take_rows(index, 10, np.array([without]), SOURCE.numpy(), target, None)
