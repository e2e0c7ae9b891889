"""Trees of tensors, whatever holds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.runtime.pytree import map_tensors, tensors_of
from shoal.train.data.rows import num_rows, take_rows, widen


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor] = field(default_factory=list)
    name: str = "output"


@dataclass(frozen=True, slots=True)
class Frozen:
    output: Output
    doubled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * self.output.logits)


class Pair(NamedTuple):
    first: Tensor
    second: Any


def test_tensors_of_dataclasses() -> None:
    ones = torch.ones(2)
    tree = Pair(ones, [Frozen(Output(ones + 1, [ones + 2])), {"none": None}])
    assert [float(t[0]) for t in tensors_of(tree)] == [1, 2, 3, 4]
    negative = map_tensors(torch.neg, tree)
    assert [float(t[0]) for t in tensors_of(negative)] == [-1, -2, -3, -4]
    assert isinstance(negative.second[0].output, Output)
    assert negative.second[0].output.name == "output"
    assert [float(t[0]) for t in tensors_of(tree)] == [1, 2, 3, 4]
    assert tensors_of(Output) == []


def test_rows_of_dataclasses() -> None:
    rows = torch.arange(6.0)
    batch = (Frozen(Output(rows, [rows + 1])), rows.long())
    assert num_rows(batch) == num_rows(batch[0]) == 6
    inputs, targets = take_rows(batch, [range(2, 4)], 6)
    assert [t.tolist() for t in tensors_of(inputs)] == [[2, 3], [3, 4], [4, 6]]
    assert targets.tolist() == [2, 3]
    assert widen(inputs).output.logits.dtype == torch.float64
