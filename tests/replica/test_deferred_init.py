"""Models that were built on the meta device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from shoal.comm.executors.solo import solo_group
from shoal.errors import BadInput
from shoal.replica.deferred_init import DeferredInit
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.models import convnet


def test_filling_gives_the_model_that_building_gives() -> None:
    """Convolutions, BatchNorm with its buffers, Linear: all initialise themselves."""
    with torch.device("meta"):
        model = convnet()
    assert all(p.is_meta for p in model.parameters())
    torch.manual_seed(0)
    DeferredInit(model).fill_all(model)
    for (name, got), wanted in zip(
        model.state_dict().items(), convnet().state_dict().values(), strict=True
    ):
        assert torch.equal(got, wanted), name


def test_batchnorm_is_filled_at_once_since_others_take_its_place() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    DeferredInit(model)
    assert [t.tolist()[0] for t in (model[1].weight, model[1].running_var)] == [1.0, 1.0]


def test_in_turn_a_tensor_comes_after_its_last_fill() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
        model[2].weight = model[0].weight
    blank = DeferredInit(model)
    filled = []
    for found in blank.fill_in_turn(model, torch.device("cpu")):
        filled.append([place.name for place in found])
        full = [n for n, p in model.named_parameters() if p.untyped_storage().nbytes() > 4]
        assert full[: len(full)] == ["0.weight", "0.bias", "1.weight", "2.bias"][: len(full)]
    assert filled == [["0.bias"], ["1.weight"], ["0.weight", "2.weight"], ["2.bias"]]


def test_tied_parameters_stay_tied() -> None:
    with torch.device("meta"):
        one = nn.Linear(3, 3)
        two = nn.Linear(3, 3)
        two.weight = one.weight
    model = nn.Sequential(one, two)
    DeferredInit(model).fill_all(model)
    assert one.weight is two.weight and not one.weight.is_meta


def test_a_job_trains_such_a_model() -> None:
    with torch.device("meta"):
        model = nn.Linear(6, 3)
    job = Job(parse("single"), solo_group(), device=torch.device("cpu"))
    step = job.step(model, nn.functional.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1))
    batch = (torch.ones(4, 6), torch.zeros(4, dtype=torch.long))
    assert float(step(batch)) > float(step(batch)) > 0


def test_a_module_that_cannot_fill_itself_is_refused_by_name() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Bare())
    with pytest.raises(BadInput, match=r"1 \(Bare\) was built on the meta device and has no reset"):
        DeferredInit(model)
