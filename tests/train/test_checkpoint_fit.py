"""A checkpoint that does not fit is refused before anything is changed, on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

import shoal
from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.errors import CheckpointError
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.checkpoints import (
    CPU,
    MOMENTUM,
    file_of,
    manifest_of,
    save_some,
    start,
    write_manifest,
)
from tests.conftest import World
from tests.models import mlp, samples

Tensors = dict[str, Tensor]
FUSED = partial(torch.optim.Adam, lr=1e-2, fused=True)
ADAGRAD = partial(torch.optim.Adagrad, lr=1e-2, fused=True)


def edit(path: Path, part: str, change: Callable[[Tensors], None]) -> None:
    """Change the tensors of a checkpoint, with digests that fit, as an attacker would."""
    file = file_of(path, part)
    tensors = load_file(file)
    change(tensors)
    file.unlink()  # the tensors are views of it
    save_file(tensors, file)
    data = file.read_bytes()
    document = manifest_of(path)
    document["files"][part].update(bytes=len(data), sha256=sha256(data).hexdigest())
    write_manifest(path, document)


def everything(step: Step) -> list[Any]:
    optimizer = step.update.optimizer
    return [
        copy.deepcopy({name: t.clone() for name, t in step.model.state_dict().items()}),
        copy.deepcopy(optimizer.state_dict()),
        (step.steps, step.update.steps),
    ]


def assert_same(first: Any, second: Any) -> None:
    (leaves, form), (others, other_form) = tree_flatten(first), tree_flatten(second)
    assert form == other_form
    for a, b in zip(leaves, others, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def refused(path: Path, match: str, **options: Any) -> None:
    job, step = start(mlp(seed=9), **options)
    for batch in job.batches(samples(10), 10):
        step(batch)
    before = everything(step)
    with pytest.raises(CheckpointError, match=match) as caught:
        job.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert_same(everything(step), before)
    assert job.steps == 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.update({"0:0.weight/exp_avg": torch.zeros(1)}), r"exp_avg is \(1,\)"),
        (lambda t: t.update({"0:0.weight/exp_avg": torch.zeros(6)}), r"exp_avg is \(6,\)"),
        (lambda t: t.update({"0:0.weight/step": torch.zeros(3)}), r"step is \(3,\)"),
        (lambda t: t.update({"0:0.weight/step": torch.tensor(True)}), "torch.bool"),
        (lambda t: t.update({"0:0.weight/exp_avg": torch.zeros(16, 6).double()}), "float64"),
        (lambda t: t.update({"0:0.weight/exp_avg": torch.zeros(16, 6).long()}), "int64"),
        (lambda t: t.pop("0:0.weight/exp_avg_sq"), "not what its manifest lists"),
        (lambda t: [t.pop(n) for n in list(t) if "0.weight/" in n], "not what its manifest lists"),
        (dict.clear, "not what its manifest lists"),
        (lambda t: t.update({"0:none/exp_avg": torch.zeros(1)}), "of 'none', which the model"),
    ],
    ids=[
        *("one element", "short", "many steps", "bool", "double", "int", "no second moment"),
        *("nothing of one parameter", "nothing", "unknown parameter"),
    ],
)
def test_optimizer_tensors_have_to_fit_their_parameters(
    tmp_path: Path, change: Callable[[Tensors], None], match: str
) -> None:
    """Fused optimizers would write out of bounds."""
    save_some(tmp_path, optimizer=FUSED)
    edit(tmp_path, "optimizer", change)
    refused(tmp_path, match, optimizer=FUSED)


def test_numbers_of_another_form_are_refused(tmp_path: Path) -> None:
    save_some(tmp_path, optimizer=FUSED)
    document = manifest_of(tmp_path)
    document["models"][0]["optimizer"]["groups"][0].update(betas=7)
    write_manifest(tmp_path, document)
    refused(tmp_path, "betas=7", optimizer=FUSED)


def test_tensors_of_an_optimizer_that_starts_with_them_are_needed(tmp_path: Path) -> None:
    save_some(tmp_path, optimizer=ADAGRAD)
    edit(tmp_path, "optimizer", lambda t: t.update({"0:0.weight/sum": torch.zeros(1, 6)}))
    refused(tmp_path, r"sum is \(1, 6\)", optimizer=ADAGRAD)


def forget(path: Path, key: str, **options: Any) -> None:
    """A checkpoint without one tensor of the optimizer, which its manifest does not list either."""
    save_some(path, **options)
    edit(path, "optimizer", lambda t: t.pop(f"0:0.weight/{key}"))
    document = manifest_of(path)
    keys = document["models"][0]["optimizer"]["keys"]
    keys["0.weight"].remove(key)
    if not keys["0.weight"]:
        del keys["0.weight"]
    write_manifest(path, document)


def test_a_tensor_that_the_optimizer_needs_is_missing(tmp_path: Path) -> None:
    forget(tmp_path, "exp_avg_sq", optimizer=FUSED)
    refused(tmp_path, "it has no exp_avg_sq of 0.weight, which", optimizer=FUSED)


def test_momentum_that_is_missing_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forget(tmp_path, "momentum_buffer")
    job, _ = start()
    job.load(tmp_path)
    told = capsys.readouterr().err
    assert "no optimizer state of 1 parameters, such as 0.weight" in told


def test_a_whole_checkpoint_is_loaded_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_some(tmp_path)
    job, _ = start()
    job.load(tmp_path)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_a_tensor_of_another_type_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    save_some(tmp_path)
    edit(tmp_path, "model", lambda t: t.update({"0:2.bias": t["0:2.bias"].to(dtype)}))
    refused(tmp_path, f"2.bias is {dtype} there and torch.float32 here")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda model: model.update(tied={"0.weight": "0.weight"}), "'0.weight' is there twice"),
        (lambda model: model["optimizer"].update(groups=[]), "other parameter groups"),
        (lambda model: model["optimizer"]["groups"][0].update(lr=float("nan")), "lr=nan"),
        (lambda model: model["optimizer"]["groups"][0].update(lr=10**400), "lr=1000"),
        (lambda model: model["optimizer"].update(keys=None), "not what its manifest lists"),
        (lambda model: model.update(steps=True), "its models"),
        (
            lambda model: model["optimizer"].update(values={"0.weight": {"momentum_buffer": 3}}),
            "momentum_buffer is there twice",
        ),
        (lambda model: model.update(tied=[]), "'tied' is not a table"),
        (lambda model: model.update(tied={"0.weight": ["0.bias"]}), "'tied' is not a table"),
        (lambda model: model.update(steps="many"), "its models"),
        (lambda model: model.update(steps=-3), "its models"),
        (lambda model: model.update(optimizer=None), "the state of nothing"),
        (lambda model: model["optimizer"].update(groups=[5, 6]), "its parameter groups"),
        (lambda model: model["optimizer"].update(values=[]), "optimizer values"),
        (lambda model: model["optimizer"].update(values={"0.weight": 3}), "optimizer values"),
        (lambda model: model["optimizer"]["groups"][0].update(lr="fast"), "lr='fast'"),
        (lambda model: model["optimizer"]["groups"][0].update(weight_decay=None), "weight_decay"),
    ],
)
def test_a_refusal_by_the_optimizer_comes_before_the_weights_change(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], match: str
) -> None:
    save_some(tmp_path)
    document = manifest_of(tmp_path)
    change(document["models"][0])
    write_manifest(tmp_path, document)
    refused(tmp_path, match)


def test_two_models_come_back_and_a_refusal_for_the_second_leaves_the_first(tmp_path: Path) -> None:
    def pair(seed: int) -> tuple[Job, list[Step]]:
        job = Job(parse("single"), solo_group(), device=CPU)
        return job, [job.step(mlp(seed + i), F.cross_entropy, optimizer=MOMENTUM) for i in (0, 1)]

    job, steps = pair(0)
    for batch in job.batches(samples(20), 10):
        for step in steps:
            step(batch)
    job.save(tmp_path)
    again, others = pair(7)
    again.load(tmp_path)
    assert_same([everything(step) for step in others], [everything(step) for step in steps])
    edit(tmp_path, "optimizer", lambda t: t.update({"1:4.bias/momentum_buffer": torch.ones(2)}))
    again, others = pair(7)
    before = [everything(step) for step in others]
    with pytest.raises(CheckpointError, match=r"4\.bias: momentum_buffer is \(2,\)"):
        again.load(tmp_path)
    assert_same([everything(step) for step in others], before)


class WithTable(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = shoal.Embedding(100, 4, optimizer=partial(torch.optim.Adagrad, lr=0.1))
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(ids))
        return out


def rows_of(step: Step) -> Tensors:
    return step.embeddings[0].state()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update({"0:table/sum": t["0:table/sum"][:-1]}),
        lambda t: t.update({"0:table/rows": t["0:table/rows"].double()}),
        lambda t: t.pop("0:table/sum"),
        lambda t: t["0:table/ids"].fill_(7),
        lambda t: t["0:table/ids"].add_(1000),
        lambda t: t.update({"0:head.bias": torch.zeros(2)}),
    ],
    ids=["short", "double", "no sum", "one id", "other ids", "the model"],
)
def test_rows_stay_when_a_checkpoint_is_refused(
    tmp_path: Path, change: Callable[[Tensors], None]
) -> None:
    ids = torch.arange(10)
    job, step = start(WithTable())
    step((ids, ids % 3))
    job.save(tmp_path)
    edit(tmp_path, "model", change)
    again, step_again = start(WithTable(seed=5))
    step_again((ids + 20, ids % 3))
    before = [everything(step_again), rows_of(step_again)]
    with pytest.raises(CheckpointError):
        again.load(tmp_path)
    assert_same([everything(step_again), rows_of(step_again)], before)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        ('ddp(compress="topk(0.1)")', "residual"),
        ('localsgd(every=2, outer="nesterov(lr=0.7)")', "momentum_buffer"),
        ('localsgd(every=3, outer="adam(lr=0.1)")', "agreed"),
        ("zero(1)", "exp_avg"),
    ],
)
def test_no_rank_loads_what_one_of_them_refuses(
    world: World, tmp_path: Path, strategy: str, name: str
) -> None:
    """State of the strategy or of the optimizer of a parameter that one rank may own alone."""
    models = [mlp(seed=rank) for rank in range(2)]

    def train(group: Group) -> tuple[Job, Step]:
        job = Job(parse(strategy), group, device=CPU, seed=3)
        step = job.step(models[group.rank], F.cross_entropy, optimizer=FUSED)
        for batch in job.batches(samples(32), 8):
            step(batch)
        return job, step

    def save(group: Group) -> None:
        train(group)[0].save(tmp_path)

    def refuse(group: Group) -> None:
        job, step = train(group)
        before = everything(step)
        with pytest.raises(CheckpointError):
            job.load(tmp_path)
        assert_same(everything(step), before)

    world(2, save)
    edit(tmp_path, "optimizer", lambda t: _shorten(t, name))
    world(2, refuse)


def _shorten(tensors: Tensors, name: str) -> None:
    full = next(key for key in reversed(tensors) if key.endswith(name) and tensors[key].dim())
    tensors[full] = tensors[full].flatten()[:-1].clone()
