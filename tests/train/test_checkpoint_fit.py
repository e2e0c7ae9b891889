"""A checkpoint that does not fit is refused before anything is changed, on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
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
    sign_file,
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
    sign_file(path, part)


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


def refused(path: Path, match: str, optimizer: Any = FUSED) -> None:
    job, step = start(mlp(seed=9), optimizer=optimizer)
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
        (lambda t: t.update({"0:0.weight/step": torch.ones((), dtype=torch.bfloat16)}), "bfloat16"),
        (lambda t: t.update({"0:0.weight/exp_avg": torch.zeros(16, 6).double()}), "float64"),
        (lambda t: t.update({"0:0.weight/exp_avg": torch.zeros(16, 6).long()}), "int64"),
        (lambda t: t.pop("0:0.weight/exp_avg_sq"), "not what its manifest lists"),
        (lambda t: [t.pop(n) for n in list(t) if "0.weight/" in n], "not what its manifest lists"),
        (dict.clear, "not what its manifest lists"),
        (lambda t: t.update({"0:none/exp_avg": torch.zeros(1)}), "of 'none', which the model"),
    ],
)
def test_optimizer_tensors_have_to_fit_their_parameters(
    tmp_path: Path, change: Callable[[Tensors], None], match: str
) -> None:
    """Fused optimizers would write out of bounds."""
    save_some(tmp_path, optimizer=FUSED)
    edit(tmp_path, "optimizer", change)
    refused(tmp_path, match)


def test_tensors_of_an_optimizer_that_starts_with_them_are_needed(tmp_path: Path) -> None:
    save_some(tmp_path, optimizer=ADAGRAD)
    edit(tmp_path, "optimizer", lambda t: t.update({"0:0.weight/sum": torch.zeros(1, 6)}))
    refused(tmp_path, r"sum is \(1, 6\)", optimizer=ADAGRAD)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_a_tensor_of_another_type_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    save_some(tmp_path, optimizer=FUSED)
    edit(tmp_path, "model", lambda t: t.update({"0:2.bias": t["0:2.bias"].to(dtype)}))
    refused(tmp_path, f"2.bias is {dtype} there and torch.float32 here")


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
    refused(tmp_path, "it has no exp_avg_sq of 0.weight, which")


def test_momentum_that_is_missing_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_some(tmp_path / "whole")
    start()[0].load(tmp_path / "whole")
    assert capsys.readouterr().err == ""
    forget(tmp_path / "less", "momentum_buffer")
    start()[0].load(tmp_path / "less")
    told = capsys.readouterr().err
    assert "no optimizer state of 1 parameters, such as 0.weight" in told


def in_group(**values: Any) -> Callable[[Any], None]:
    return lambda model: model["optimizer"]["groups"][0].update(values)


def in_optimizer(**values: Any) -> Callable[[Any], None]:
    return lambda model: model["optimizer"].update(values)


def in_model(**values: Any) -> Callable[[Any], None]:
    return lambda model: model.update(values)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (in_model(tied={"0.weight": "0.weight"}), "'0.weight' is there twice"),
        (in_model(tied=[]), r"its models: .*\.tied"),
        (in_model(tied={"0.weight": ["0.bias"]}), r"its models: .*\.tied"),
        *((in_model(steps=steps), r"its models: .*\.steps") for steps in (True, "many", -3)),
        (in_model(optimizer=None), r"its models: .*\.optimizer"),
        (in_model(scaler={"scale": 0.0}), r"its models: .*\.scale"),
        (in_optimizer(groups=[]), "other parameter groups"),
        (in_optimizer(groups=[{"params": 5}]), "other parameter groups"),
        (in_optimizer(groups=[5, 6]), r"its models: .*\.groups"),
        (in_optimizer(keys={}), "not what its manifest lists"),
        (in_optimizer(values={"0.weight": {"exp_avg": 3}}), "exp_avg is there twice"),
        (in_optimizer(values={"0.weight": 3}), r"its models: .*\.values"),
        (in_group(lr=float("nan")), "lr=nan"),
        (in_group(lr=10**400), "lr=1000"),
        (in_group(lr="fast"), "lr='fast'"),
        (in_group(weight_decay=None), "weight_decay"),
        (in_group(betas=7), "betas=7"),
    ],
)
def test_a_refusal_by_the_optimizer_comes_before_the_weights_change(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], match: str
) -> None:
    save_some(tmp_path, optimizer=FUSED)
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

    def body(group: Group) -> None:
        job, step = start(models[group.rank], group, strategy, optimizer=FUSED)
        for batch in job.batches(samples(32), 8):
            step(batch)
        job.save(tmp_path)
        if group.rank == 0:
            edit(tmp_path, "optimizer", lambda t: _shorten(t, name))
        job.barrier()
        before = everything(step)
        with pytest.raises(CheckpointError):
            job.load(tmp_path)
        assert_same(everything(step), before)

    world(2, body)


def _shorten(tensors: Tensors, name: str) -> None:
    full = next(key for key in reversed(tensors) if key.endswith(name) and tensors[key].dim())
    tensors[full] = tensors[full].flatten()[:-1].clone()
