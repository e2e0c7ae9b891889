"""Batches and losses as people have them: equal to one device in every form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.commands.verify import _reasons
from shoal.errors import BadInput
from shoal.observe.double_check import CapturedRun
from shoal.replica.loss import sum_of_samples
from tests.conftest import World
from tests.jobs import SGD, job_of
from tests.models import mlp, samples
from tests.splitting import job_of as make_job

CPU = torch.device("cpu")
STRATEGIES = ["zero(2)", "zero(3)", 'ps(placement="rank0")', "pp(2)", "tp(2)"]


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()


class Labeled(Body):
    """As Hugging Face's models: labels are an argument, and the loss is an entry."""

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(features)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Nested(Body):
    def forward(self, views: dict[str, Tensor]) -> Any:
        return self.body(views["left"] + views["right"])


class Ragged(Body):
    """Takes a list of samples of different lengths."""

    def forward(self, sequences: list[Tensor]) -> Any:
        return self.body(torch.stack([s.mean(dim=0) for s in sequences]))


@dataclass
class Graphs:
    """Samples in one object, which knows how to move but not how to split."""

    x: Tensor
    y: Tensor

    def to(self, device: torch.device) -> Graphs:
        return Graphs(self.x.to(device), self.y.to(device))


class OnGraphs(Body):
    def forward(self, graphs: Graphs) -> Any:
        return self.body(graphs.x)


def weighted(logits: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return (F.cross_entropy(logits, y, reduction="none") * weight).mean()


def of_entry(logits: Tensor, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(logits, batch["label"])


def small(logits: Tensor) -> Tensor:
    return logits.square().mean()


def with_accuracy(logits: Tensor, y: Tensor) -> dict[str, Any]:
    accuracy = (logits.argmax(dim=1) == y).float().mean()
    return {"loss": F.cross_entropy(logits, y), "accuracy": accuracy}


def sequences(items: list[Any]) -> tuple[list[Tensor], Tensor]:
    x, y = zip(*items, strict=True)
    return [s.expand(2 + i % 3, 6) for i, s in enumerate(x)], torch.stack(y)


def graphs(items: list[Any]) -> Graphs:
    return Graphs(*default_collate(items))


PAIRS = [samples(22)[i] for i in range(22)]
FORMS: dict[str, tuple[Callable[[], nn.Module], Any, Any, dict[str, Any]]] = {
    "(x, y, weight)": (
        mlp,
        weighted,
        [(x, y, torch.tensor(0.1 * i)) for i, (x, y) in enumerate(PAIRS)],
        {},
    ),
    "(x,)": (mlp, small, [(x,) for x, _ in PAIRS], {}),
    "x": (mlp, small, [x for x, _ in PAIRS], {}),
    "dict with labels": (Labeled, None, [{"features": x, "labels": y} for x, y in PAIRS], {}),
    "dict of dicts": (
        Nested,
        of_entry,
        [{"views": {"left": x, "right": x}, "label": y, "name": "a"} for x, y in PAIRS],
        {},
    ),
    "ragged": (Ragged, F.cross_entropy, PAIRS, {"collate": sequences}),
    "object": (OnGraphs, lambda out, g: F.cross_entropy(out, g.y), PAIRS, {"collate": graphs}),
    "several numbers": (mlp, with_accuracy, PAIRS, {}),
}


def train(group: Group, strategy: str, model: nn.Module, form: str, **options: Any) -> Any:
    _, loss, data, loading = FORMS[form]
    options = {"loss": loss, "optimizer": SGD, **options}
    with make_job(group, strategy, model, **options) as (job, step):
        returned = [step(batch) for batch in job.batches(data, 8, **loading)]
        with step.sync.full_weights():
            return returned, [p.detach().clone() for p in step.model.parameters()]


def assert_equal(world: World, strategy: str, form: str, **options: Any) -> None:
    make = FORMS[form][0]
    models = [make() for _ in range(2)]
    wanted, wanted_parameters = train(solo_group(), "single", make(), form, **options)
    together = world(2, lambda g: train(g, strategy, models[g.rank], form, **options))
    for returned, parameters in together:
        torch.testing.assert_close(returned, wanted, rtol=1e-4, atol=2e-5)
        if "pp" not in strategy and "tp" not in strategy:  # where a worker has all of them
            torch.testing.assert_close(parameters, wanted_parameters, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(text, marks=pytest.mark.whole) for text in STRATEGIES)]
)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_trains_as_on_one_device(world: World, form: str, strategy: str) -> None:
    if strategy == "pp(2)" and form in ("object", "ragged"):
        pytest.skip("objects have no micro-batches; a forward over a list cannot be traced")
    assert_equal(world, strategy, form)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "object"])
def test_every_form_is_split_into_micro_batches(world: World, form: str) -> None:
    assert_equal(world, "ddp", form, accumulate=3)


def test_several_numbers_come_back_as_the_loss_returned_them() -> None:
    step = job_of().step(mlp(), lambda out, y: (F.cross_entropy(out, y), 2.0), optimizer=SGD)
    loss, two = step(samples(8).tensors)
    assert loss.dim() == 0 and two == 2.0


def test_an_object_that_cannot_be_split_and_a_model_without_a_loss_are_refused() -> None:
    job = job_of()
    step = job.step(OnGraphs(), small, optimizer=SGD, accumulate=2)
    with pytest.raises(BadInput, match="holds a Graphs, which cannot be split"):
        for batch in job.batches(PAIRS, 8, collate=graphs):
            step(batch)
    step = job_of().step(mlp(), optimizer=SGD)
    with pytest.raises(BadInput, match=r"job\.step has no loss, and the model returns none"):
        step(samples(4).tensors)


def test_an_evaluation_takes_the_same_forms(world: World) -> None:
    data = FORMS["dict with labels"][2]
    models = [Labeled() for _ in range(3)]

    def body(group: Group, model: nn.Module) -> Any:
        job = job_of(group)
        job.step(model, optimizer=SGD)
        return job.evaluate(lambda out, b: (out["logits"][:, 0] > 0).float().mean(), data, 4)

    alone = body(solo_group(), models[2])
    assert world(2, lambda g: body(g, models[g.rank])) == pytest.approx([alone, alone])


def test_a_sum_of_torch_is_known_and_refused_where_a_batch_is_cut() -> None:
    sums = nn.CrossEntropyLoss(reduction="sum")
    assert sum_of_samples(sums) == "CrossEntropyLoss"
    assert sum_of_samples(partial(F.mse_loss, reduction="sum")) == "mse_loss"
    means = [nn.KLDivLoss(reduction="batchmean"), partial(F.mse_loss, reduction="mean")]
    assert not any(map(sum_of_samples, [*means, F.cross_entropy, None]))
    job_of().step(mlp(), sums, optimizer=SGD)
    with pytest.raises(BadInput, match='CrossEntropyLoss has reduction="sum"'):
        job_of().step(mlp(), sums, optimizer=SGD, accumulate=2)


def captured(loss: float) -> CapturedRun:
    return CapturedRun([loss], {"w": torch.ones(1)}, 1, 0.0, [], exact=False)


def test_verify_names_a_sum() -> None:
    (reason,) = _reasons(captured(40.0), captured(20.0), 2)
    assert "1/2 of that of one worker, so it is probably a sum over samples" in reason
    assert not list(_reasons(captured(2.5), captured(2.4), 2))
    assert not list(_reasons(captured(0.0), captured(0.0), 2))
    (reason,) = _reasons(replace(captured(1.0), ignored_targets="batch[1]"), captured(1.0), 2)
    assert "needs `count`, such as job.step(..., count=lambda batch: (batch[1] != -100)" in reason
