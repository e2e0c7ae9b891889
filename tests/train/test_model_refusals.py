"""Models and loops that a strategy cannot train are refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.errors import BadInput
from tests.conftest import World
from tests.models import samples
from tests.seeds import seeded
from tests.splitting import job_of
from tests.train.test_own_loop import assert_equal_to_single, run


@seeded(0)
def two_layers() -> nn.Module:
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
        optimizer.step()
        optimizer.zero_grad()
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


@pytest.mark.parametrize("strategy", ["zero(3)", "tp(2)"])
def test_torch_func_around_a_model(world: World, strategy: str) -> None:
    with pytest.raises(BadInput, match=r"torch\.func.* take ddp, ps, zero\(1\) or zero\(2\)"):
        world(2, lambda g: run(g, strategy, two_layers(), meta_learning))


@pytest.mark.parametrize("strategy", ["zero(3)", "tp(2)"])
def test_torch_func_in_a_model(world: World, strategy: str) -> None:
    def script(group: Group) -> None:
        with job_of(group, strategy, Inner()) as (job, step):
            for batch in job.batches(samples(8), 4):
                step(batch)

    with pytest.raises(BadInput, match=r"torch\.func.* take ddp, ps, zero\(1\) or zero\(2\)"):
        world(2, script)


def test_sparse_adam(world: World) -> None:
    def script(job: Any, model: Any) -> None:
        job.setup(model, torch.optim.SparseAdam(list(model[0].parameters())))

    def make() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 2))

    with pytest.raises(BadInput, match=r"SparseAdam takes sparse gradients, and ddp .* of 0 as"):
        world(2, lambda g: run(g, "ddp", make(), script))


def test_a_loss_that_reads_what_a_hook_has_stored(world: World) -> None:
    def script(group: Group) -> None:
        model: Any = two_layers()
        stored: dict[str, Tensor] = {}
        model[1].register_forward_hook(lambda m, i, o: stored.__setitem__("a", o))

        def loss(out: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(out, y) + stored["a"].mean()

        with job_of(group, "pp(2)", model, loss=loss) as (job, step):
            for batch in job.batches(samples(8), 4):
                step(batch)

    with pytest.raises(BadInput, match=r"forward hooks, such as that of 1, run"):
        world(2, script)


def test_torch_func_under_ddp(world: World) -> None:
    assert_equal_to_single(world, 2, "ddp", meta_learning, two_layers)
