"""Mistakes in calls of a job are one sentence with the name that is meant."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.errors import BadInput
from tests import scripts
from tests.conftest import World
from tests.jobs import SGD, job_of
from tests.models import mlp, samples
from tests.splitting import refused

MISTAKES: list[tuple[Callable[[Any], object], str]] = [
    (lambda job: job.log({"loss": 1.0}), "job.log(name=…): too many positional arguments"),
    (
        lambda job: job.step(mlp(), F.cross_entropy, optim=SGD),
        "job.step(model, loss, optimizer=…): no argument is 'optim'; did you mean 'optimizer'?",
    ),
    (
        lambda job: job.step(mlp(), F.cross_entropy),
        "job.step(model, loss, optimizer=…): missing a required argument: 'optimizer'",
    ),
    (
        lambda job: job.step(F.cross_entropy, mlp(), optimizer=SGD),
        "job.step(model, loss, …): the model comes first, and this is a function",
    ),
    (
        lambda job: job.step(mlp(), nn.CrossEntropyLoss, optimizer=SGD),
        "the loss is the class CrossEntropyLoss: give job.step an object, CrossEntropyLoss()",
    ),
    (lambda job: job.save(""), 'job.save("") names no folder: job.save("model")'),
    (
        lambda job: job.step(mlp(), F.cross_entropy, optimizer=SGD)(*samples(4).tensors),
        "step(batch) takes a batch as one argument, such as step((inputs, targets)), not 2",
    ),
    (lambda job: job.world_size, "a job has no 'world_size': it is job.size here"),
    (lambda job: job.evalute, "a job has no 'evalute': did you mean 'evaluate'?"),
]


@pytest.mark.parametrize(("call", "sentence"), MISTAKES)
def test_a_mistake_is_a_sentence(call: Callable[[Any], object], sentence: str) -> None:
    with pytest.raises(BadInput, match=re.escape(sentence)):
        call(job_of())


def test_a_type_error_of_the_script_stays_one() -> None:
    job = job_of()
    job.step(mlp(), F.cross_entropy, optimizer=SGD)
    with pytest.raises(TypeError, match="not subscriptable"):
        job.evaluate(lambda outputs, targets: len[outputs], samples(4), 2)  # type: ignore[index]


def test_whether_a_job_has_a_name_can_be_asked() -> None:
    assert not hasattr(job_of(), "world_size") and hasattr(job_of(), "size")


def test_weights_of_samples_are_not_taken_for_weights_of_classes(world: World) -> None:
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    sentence = refused(world, 2, "ddp", mlp, TensorDataset(x, y, torch.rand(8)))
    assert "cross_entropy takes weights of classes there" in sentence


class Penalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.requires_grad_()).tanh()
        (slope,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)
        out: Tensor = self.second(hidden) + slope.square().mean()
        return out


def test_a_pipeline_refuses_a_forward_that_asks_for_gradients(world: World) -> None:
    sentence = refused(world, 2, "pp(2)", Penalized, samples(16))
    assert "this one calls torch.autograd.grad: train it under ddp, zero or ps" in sentence


def test_a_failure_before_training_is_printed_once(tmp_path: Path) -> None:
    text = scripts.PLAIN.replace("sgd = ", "raise ValueError('no data in here')\nsgd = ")
    (tmp_path / "train.py").write_text(text)
    answer = scripts.shoal("run", "-n", "2", "-s", "ddp", "train.py", cwd=tmp_path)
    assert answer.returncode == 1
    assert (answer.stdout + answer.stderr).count("ValueError: no data in here") == 1
