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

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.errors import BadInput
from tests.conftest import World
from tests.seeds import seeded
from tests.splitting import job_of

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


def train(group: Group, strategy: str, model: nn.Module, path: Path | None = None) -> Any:
    x = torch.randn(10, 1, 8, generator=torch.Generator().manual_seed(1))  # threads share torch's
    options: Any = {"optimizer": ADAM, "clip_norm": 0.5}
    with job_of(group, strategy, model, loss=F.mse_loss, **options) as (job, step):
        if path is not None and path.exists():
            job.load(path)
        losses = [float(step(b)) for b in job.batches(TensorDataset(x, x.cumsum(-1)), 5, epochs=2)]
        if path is not None:
            job.save(path)
        with step.sync.full_weights():
            return losses, model.get_parameter("weight").detach().clone()


@pytest.mark.parametrize("strategy", ["ddp", "zero(2)"])
def test_they_are_trained_as_on_one_device(world: World, strategy: str) -> None:
    losses, weight = train(solo_group(), "single", Spectral())
    models = [Spectral(), Spectral()]
    for others, other in world(2, lambda g: train(g, strategy, models[g.rank])):
        assert others == pytest.approx(losses, abs=1e-5)
        torch.testing.assert_close(other, weight, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_has_them(world: World, tmp_path: Path) -> None:
    models = [Spectral(), Spectral(), Spectral()]
    world(2, lambda g: train(g, "zero(2)", models[g.rank], tmp_path / "model"))
    train(solo_group(), "single", models[2], tmp_path / "model")
    assert torch.equal(models[2].weight, models[0].weight)


@pytest.mark.parametrize("strategy", ['ps(placement="rank0")', "zero(3)", "tp(2)", "pp(2)"])
def test_where_they_are_refused(world: World, strategy: str) -> None:
    with pytest.raises(BadInput, match=r"^weight is torch\.complex64, and .* take ddp, zero"):
        world(2, lambda g: train(g, strategy, Spectral()))
