"""Items mapped on workers, their results reduced in order."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.group import Group
from shoal.comm.objects import encode
from shoal.errors import BadInput
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.train.map_reduce import map_reduce_over
from tests.conftest import World


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_results_are_reduced_in_the_order_of_items(world: World, size: int) -> None:
    """With fewer items than workers, too; joining text is associative and not commutative."""
    for n in (1, 4, 11):
        found = world(size, lambda g, n=n: map_reduce_over(g, str, range(n), operator.add))
        assert found == ["".join(map(str, range(n)))] * size


def test_items_are_mapped_once_where_they_are(world: World) -> None:
    def body(group: Group) -> tuple[list[int], list[int]]:
        seen: list[int] = []

        def note(item: int) -> list[int]:
            seen.append(item)
            return [item * item]

        job = Job(parse("ddp"), group, device=torch.device("cpu"))
        return seen, job.map_reduce(note, iter(range(7)), operator.add)

    found = world(3, body)
    assert [seen for seen, _ in found] == [[0, 1], [2, 3], [4, 5, 6]]
    assert all(result == [0, 1, 4, 9, 16, 25, 36] for _, result in found)


def test_tensors_in_trees_are_added_up_on_every_rank(world: World) -> None:
    def count(word: str) -> dict[str, Any]:
        return {"letters": torch.bincount(torch.tensor([ord(c) - 97 for c in word]), minlength=26)}

    def add(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        return {"letters": a["letters"] + b["letters"]}

    for found in world(2, lambda g: map_reduce_over(g, count, ["abba", "cab", "b"], add)):
        assert found["letters"][:4].tolist() == [3, 4, 1, 0]


def test_alone_it_needs_no_job() -> None:
    assert shoal.map_reduce(lambda x: x * x, [1, 2, 3], operator.add) == 14
    with pytest.raises(BadInput, match="no items"):
        shoal.map_reduce(str, [], operator.add)


def test_what_cannot_travel_is_refused_alone_as_well() -> None:
    with pytest.raises(BadInput, match="a set cannot be sent to another worker"):
        shoal.map_reduce(lambda x: {x}, [1, 2], operator.or_)
    with pytest.raises(BadInput, match="cannot be sent"):
        encode({1 << 70: "a key"})
    with pytest.raises(BadInput, match="cannot be sent"):
        encode(torch.eye(2).to_sparse())
