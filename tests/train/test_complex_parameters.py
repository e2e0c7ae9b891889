"""Complex parameters beside real ones, as in Fourier neural operators."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.conftest import World
from tests.seeds import seeded
from tests.splitting import assert_equal, refused, trained

ADAM = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)


class Spectral(nn.Module):
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
OPTIONS: Any = {"optimizer": ADAM, "clip_norm": 0.5, "loss": F.mse_loss}


@pytest.mark.parametrize("strategy", ["ddp", "zero(2)"])
def test_they_are_trained_as_on_one_device(world: World, strategy: str) -> None:
    assert_equal(world, 2, strategy, Spectral, DATA, 5, epochs=2, **OPTIONS)


def test_a_checkpoint_has_them(world: World, tmp_path: Path) -> None:
    saved = trained(world, "zero(2)", Spectral, DATA, None, save=tmp_path / "model", **OPTIONS)
    loaded = trained(world, "single", Spectral, DATA, None, load=tmp_path / "model", **OPTIONS)
    assert torch.equal(loaded["weight"], saved["weight"])  # no batch is left


@pytest.mark.parametrize("strategy", ['ps(placement="rank0")', "zero(3)", "tp(2)", "pp(2)"])
def test_where_they_are_refused(world: World, strategy: str) -> None:
    sentence = refused(world, 2, strategy, Spectral, DATA, **OPTIONS)
    assert sentence.startswith("weight is torch.complex64, and ") and "take ddp, zero" in sentence
