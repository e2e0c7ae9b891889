"""Optimizers that look at more than a worker has are refused where it has a part."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.group import Group
from shoal.replica.optimizers import LooksAt, looks_at
from tests.conftest import World
from tests.models import mlp, samples
from tests.splitting import assert_equal, job_of, refused


class Renamed(torch.optim.SGD):
    """Updates as SGD does."""


class Own(torch.optim.SGD):
    """Its update is not known."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Elementwise(Own):
    looks_at = "element"


class ByGlobalNorm(Own):
    looks_at = "model"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (torch.optim.Adam, LooksAt.ELEMENT),
        (Renamed, LooksAt.ELEMENT),
        (Elementwise, LooksAt.ELEMENT),
        (torch.optim.Adafactor, LooksAt.PARAMETER),
        (torch.optim.Muon, LooksAt.PARAMETER),
        (Own, None),
        (ByGlobalNorm, LooksAt.MODEL),
    ],
)
def test_a_class_is_known_or_says_what_it_looks_at(kind: Any, expected: LooksAt | None) -> None:
    assert looks_at(kind([nn.Parameter(torch.ones(4, 4))], lr=0.1)) is expected


@pytest.mark.parametrize(
    ("strategy", "kind", "sentence"),
    [
        ("tp(2)", torch.optim.Adafactor, "Adafactor .*take ddp"),
        ("tp(2)", Own, "Own.looks_at = "),
        ("zero(2)", ByGlobalNorm, "ByGlobalNorm .*take ddp"),
        ("pp(2)", ByGlobalNorm, "ByGlobalNorm .*take ddp"),
    ],
)
def test_no_strategy_gives_an_optimizer_less_than_it_looks_at(
    world: World, strategy: str, kind: Any, sentence: str
) -> None:
    assert re.search(sentence, refused(world, 2, strategy, mlp, optimizer=partial(kind, lr=0.1)))


def test_an_optimizer_of_whole_parameters_trains_under_zero(world: World) -> None:
    adafactor = partial(torch.optim.Adafactor, lr=0.1)
    assert_equal(world, 2, "zero(2)", mlp, samples(30), 10, optimizer=adafactor)


def test_one_that_is_not_known_is_named_where_workers_have_some_parameters(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(group: Group) -> None:
        with job_of(group, "zero(2)", mlp(), optimizer=partial(Own, lr=0.1)):
            pass

    world(2, body)
    assert capfd.readouterr().err.count('Own.looks_at = "model"') == 1
