"""Models and loops that a strategy cannot train are refused in a sentence."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.train.job import Job
from shoal.train.step.prepare_model import KnownParameters
from tests.conftest import World
from tests.models import mlp, samples
from tests.seeds import seeded
from tests.splitting import (
    SGD,
    assert_equal,
    assert_script_equal,
    assert_script_refused,
    refused,
    run,
    trained,
    update,
)


@seeded(0)
def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def meta_learning(job: Any, model: nn.Module) -> list[float]:
    """A step of gradient descent for each sample, inside of the loss, by torch.func."""
    model, optimizer = job.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss_of(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    def task(params: Any, x: Tensor, y: Tensor) -> Tensor:
        first = grad(loss_of)(params, x, y)
        return loss_of({name: params[name] - 0.1 * first[name] for name in params}, x, y)

    losses = []
    for x, y in job.batches(samples(8), 4):
        params = dict(model.named_parameters())
        loss = vmap(task, in_dims=(None, 0, 0))(params, x, y).mean()
        losses.append(float(job.backward(loss)))
        update(optimizer)
    return losses


class Inner(nn.Module):
    """Uses torch.func in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = two_layers()

    def forward(self, x: Tensor) -> Tensor:
        slope: Tensor = grad(lambda x: self.net(x).sum())(x)
        out: Tensor = self.net(x + slope)
        return out


def stepping(job: Any, model: nn.Module, loss: Any = F.cross_entropy) -> None:
    step = job.step(model, loss, optimizer=SGD)
    for batch in job.batches(samples(8), 4):
        step(batch)


@pytest.mark.parametrize("strategy", ["zero(3)", "tp(2)"])
@pytest.mark.parametrize(("script", "make"), [(meta_learning, two_layers), (stepping, Inner)])
def test_torch_func_around_and_in_a_model(
    world: World, script: Any, make: Any, strategy: str
) -> None:
    sentence = r"torch\.func.* take ddp, ps, zero\(1\) or zero\(2\)"
    assert_script_refused(world, strategy, script, sentence, make)


def test_torch_func_under_ddp(world: World) -> None:
    assert_script_equal(world, 2, "ddp", meta_learning, two_layers)


def test_a_loss_that_reads_what_a_hook_has_stored(world: World) -> None:
    def script(job: Job, model: Any) -> None:
        stored: dict[str, Tensor] = {}
        model[1].register_forward_hook(lambda m, i, o: stored.__setitem__("a", o))
        stepping(job, model, lambda out, y: F.cross_entropy(out, y) + stored["a"].mean())

    with pytest.raises(BadInput, match=r"forward hooks, such as that of 1, run"):
        world(2, lambda g: run(g, "pp(2)", two_layers(), script))


@pytest.mark.parametrize("strategy", ["ddp", "zero(3)", "pp(2)"])
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda: nn.Linear(6, 7), r"0\.weight \[7, 6\] torch.float32"),
        (lambda: nn.Linear(6, 8).double(), r"0\.weight .*float64"),
        (lambda: nn.Linear(6, 8).requires_grad_(False), r"0\.weight .*, not trained"),
        (lambda: nn.Linear(6, 8, bias=False), r"2\.weight"),
        (lambda: nn.Bilinear(6, 6, 8), r"0 \(Bilinear\)"),
    ],
)
def test_ranks_with_different_models(
    world: World, strategy: str, change: Any, difference: str
) -> None:
    def body(group: Group) -> None:
        model = two_layers()
        if group.rank == 1:
            model[0] = change()
        run(group, strategy, model, stepping)

    with pytest.raises(BadInput, match=f"rank 1 has built another .* does not have {difference}"):
        world(2, body)


def copying(job: Job, model: Any, path: Path) -> None:
    stepping(job, model)
    with pytest.raises(BadInput, match=r"another worker.*job\.save"):
        model.state_dict()
    job.save(path)
    job.load(path)
    with pytest.raises(BadInput, match=r"deepcopy of Linear.* job\.ema .* zero\(2\)"):
        copy.deepcopy(next(model.children()))
    with pytest.raises(BadInput, match="AveragedModel"):
        torch.optim.swa_utils.AveragedModel(model)


def test_copies_of_released_parameters_are_refused_and_saving_works(
    world: World, tmp_path: Path
) -> None:
    models = [two_layers(), two_layers()]
    script = partial(copying, path=tmp_path / "saved")
    world(2, lambda g: run(g, "zero(3)", models[g.rank], script))


def test_state_dict_of_slices_says_so_once(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(job: Job, model: nn.Module) -> None:
        stepping(job, model)
        model.load_state_dict(model.state_dict())

    models = [two_layers(), two_layers()]
    world(2, lambda g: run(g, "tp(2)", models[g.rank], script))
    assert capsys.readouterr().err.count("this worker's part") == 1


def _add(model: Any) -> None:
    model[2].extra = nn.Linear(2, 2)


def _replace(model: Any) -> None:
    model[2].weight = nn.Parameter(torch.zeros_like(model[2].weight))


def _append(model: Any) -> None:
    model.append(nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("change", "name"), [(_add, "2.extra.weight"), (_replace, "2.weight"), (_append, "5.weight")]
)
def test_a_step_notices(world: World, change: Any, name: str) -> None:
    def train(job: Job, model: nn.Module) -> None:
        job.on_step.append(lambda step, loss: change(model))
        stepping(job, model)

    sentence = f"^{name} was added to Sequential, or replaced, after"
    assert_script_refused(world, "ddp", train, sentence, mlp)


def test_a_loop_notices(world: World) -> None:
    def loop(job: Job, model: Any) -> None:
        job.setup(model, SGD)
        _append(model)
        job.backward(model(torch.ones(4, 6)).mean())

    assert_script_refused(world, "ddp", loop, r"5\.weight was added")


def test_other_changes_do_not_matter() -> None:
    model: Any = mlp()
    known = KnownParameters(model)
    del model[2]
    model.append(nn.ReLU())
    model[0].scale = nn.Parameter(torch.ones(1), requires_grad=False)
    known.check()
    _append(model)
    known.remember()
    known.check()


class Spectral(nn.Module):
    """Complex parameters beside real ones, as in Fourier neural operators."""

    @seeded(0)
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, 4, 1)
        self.weight = nn.Parameter(torch.randn(4, 4, 3, dtype=torch.cfloat) * 0.1)
        self.out = nn.Conv1d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x)
        modes = torch.einsum("bix,iox->box", torch.fft.rfft(h)[..., :3], self.weight)
        out: Tensor = self.out(F.gelu(h + torch.fft.irfft(modes, n=x.shape[-1])))
        return out


X = torch.randn(10, 1, 8, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X.cumsum(-1))
ADAM = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)
OPTIONS: Any = {"optimizer": ADAM, "clip_norm": 0.5, "loss": F.mse_loss}


@pytest.mark.parametrize("strategy", ["ddp", "zero(2)"])
def test_complex_parameters_are_trained_as_on_one_device(world: World, strategy: str) -> None:
    assert_equal(world, 2, strategy, Spectral, DATA, 5, epochs=2, **OPTIONS)


def test_a_checkpoint_has_complex_parameters(world: World, tmp_path: Path) -> None:
    saved = trained(world, "zero(2)", Spectral, DATA, None, save=tmp_path / "model", **OPTIONS)
    loaded = trained(world, "single", Spectral, DATA, None, load=tmp_path / "model", **OPTIONS)
    assert torch.equal(loaded["weight"], saved["weight"])  # no batch is left


@pytest.mark.parametrize("strategy", ['ps(placement="rank0")', "zero(3)", "tp(2)", "pp(2)"])
def test_where_complex_parameters_are_refused(world: World, strategy: str) -> None:
    sentence = refused(world, 2, strategy, Spectral, DATA, **OPTIONS)
    assert sentence.startswith("weight is torch.complex64, and ") and "take ddp, zero" in sentence
