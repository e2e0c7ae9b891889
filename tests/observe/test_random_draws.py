"""Random numbers of a model's forward: rates that are switched off, and draws that are noticed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.observe.capture import DrawWatch, switch_off_dropout


class Functional(nn.Module):
    """Rates as attributes, as in BART and OPT, and in a configuration, as in Mixtral."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(attention_dropout=0.2, router_jitter_noise=0.1, width=0.5)
        self.dropout = 0.1
        self.layer = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(F.dropout(x, self.dropout, self.training))
        return F.dropout(x, self.config.attention_dropout, self.training)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def test_rates_of_functional_dropout_are_switched_off() -> None:
    model = nn.Sequential(Functional())
    names = switch_off_dropout(model)
    assert sorted(names) == [
        *("0.attention_dropout", "0.dropout", "0.layer", "0.router_jitter_noise")
    ]
    assert torch.equal(model(torch.ones(3)), torch.ones(3))
    assert model[0].config.width == 0.5


@pytest.mark.parametrize(("inner", "expected"), [(Noise(), "1 (Noise)"), (nn.Tanh(), None)])
def test_the_module_that_draws_is_named(inner: nn.Module, expected: str | None) -> None:
    model = nn.Sequential(nn.Tanh(), inner)
    watch = DrawWatch(model)
    model(torch.ones(3))
    assert watch.module == expected
