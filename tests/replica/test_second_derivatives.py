"""What models do with autograd inside forward: the result is that of one worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from shoal.errors import BadInput
from tests.conftest import World
from tests.models import samples
from tests.splitting import assert_equal


class Penalized(nn.Module):
    """A critic with BatchNorm whose forward returns its outputs and a gradient penalty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.critic = nn.Sequential(
            *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh()),
            *(nn.Linear(8, 7), nn.BatchNorm1d(7, affine=False), nn.Tanh(), nn.Linear(7, 3)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        out = self.critic(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out, slope.square().sum(1)


class PerSample(nn.Module):
    """Gradients by sample, with torch.func, without BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        params = dict(self.inner.named_parameters())

        def energy(row: Tensor) -> Tensor:
            out: Tensor = functional_call(self.inner, params, (row,))
            return out.square().sum()

        slopes = vmap(grad(energy))(x)
        out = vmap(lambda row: functional_call(self.inner, params, (row,)))(x)
        return out, slopes.square().sum(1)


class Normed(nn.Module):
    """Weight norm, spectral norm, a shared and a frozen layer, and hooks of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = parametrizations.weight_norm(nn.Linear(6, 8))
        self.second = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.shared = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 3)
        self.head.register_forward_hook(lambda module, inputs, output: output * 2)
        self.shared.weight.register_hook(lambda g: g * 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        x = self.shared(torch.tanh(self.frozen(self.shared(x))))
        if x.requires_grad:
            x.register_hook(lambda g: g * 3)
        return self.head(x), x.square().mean(1)


def loss(outputs: Any, targets: Tensor) -> Tensor:
    out, penalty = outputs
    return F.cross_entropy(out, targets) + 0.5 * penalty.mean()


STRATEGIES = [
    *("ddp", "zero(1)", "zero(2)", "zero(3)"),
    *('ps(placement="rank0")', 'gossip(graph="complete")'),
]


@pytest.mark.product
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("make", [Penalized, PerSample, Normed])
def test_derivatives_inside_forward(world: World, make: Any, strategy: str) -> None:
    if make is PerSample and strategy == "zero(3)":
        with pytest.raises(BadInput, match=r"torch\.func\.grad.*zero\(2\)"):
            assert_equal(world, 2, strategy, make, samples(22), loss=loss)
    else:
        assert_equal(world, 2, strategy, make, samples(22), loss=loss)


def test_a_penalty_where_a_replica_has_no_rows(world: World) -> None:
    """The last batch has 2 rows for 3 replicas."""
    assert_equal(world, 3, "ddp", Penalized, samples(18), loss=loss)
