from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World


def _job(group: Group, strategy: str) -> tuple[Job, nn.Module]:
    job = Job(parse(strategy), group, device=torch.device("cpu"))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    job.step(model, nn.functional.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1))
    return job, model


def test_state_dict_of_released_parameters_is_refused_and_saving_works(
    world: World, tmp_path: Path
) -> None:
    def body(group: Group) -> str:
        job, model = _job(group, "zero(3)")
        with pytest.raises(BadInput, match="another worker") as caught:
            model.state_dict()
        job.save(tmp_path / "saved")
        job.load(tmp_path / "saved")
        job.close()
        return str(caught.value)

    assert all("job.save" in sentence for sentence in world(2, body))


def test_a_copy_of_a_sharded_model_is_refused(world: World) -> None:
    def body(group: Group) -> None:
        job, model = _job(group, "zero(3)")
        with pytest.raises(BadInput, match=r"deepcopy of Linear.* job\.ema .* zero\(2\)"):
            copy.deepcopy(next(model.children()))
        with pytest.raises(BadInput, match="AveragedModel"):
            torch.optim.swa_utils.AveragedModel(model)
        job.close()

    world(2, body)


def test_state_dict_of_slices_says_so_once(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(group: Group) -> None:
        job, model = _job(group, "tp(2)")
        model.state_dict()
        model.load_state_dict(model.state_dict())
        job.close()

    world(2, body)
    assert capsys.readouterr().err.count("this worker's part") == 1
