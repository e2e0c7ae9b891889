"""zero(…, offload=True) trains what the GPU alone has no room for, and equals the run without."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.executors.solo import solo_group
from tests.comm.torch_ranks import forked_ranks
from tests.gpu.strategies import Case, trained
from tests.models import samples
from tests.seeds import seeded

pytestmark = pytest.mark.gpu

WIDTH = 1024
LAYERS = 32
_ADAMW: dict[str, Any] = {"optimizer": partial(torch.optim.AdamW, lr=1e-3), "clip_norm": 0.5}


@seeded(0)
def deep() -> nn.Module:
    inner = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, WIDTH), *inner, nn.Linear(WIDTH, 3))


CASE = Case(deep, samples(24), 8, _ADAMW)


def limit_to_eight_bytes_a_parameter() -> None:
    """Of the GPU: half of what parameters, gradients and the state of AdamW take."""
    free_what_is_unused()
    total = torch.cuda.get_device_properties(0).total_memory
    held = torch.cuda.memory_reserved()
    limit = held + 8 * sum(p.numel() for p in deep().parameters())
    torch.cuda.set_per_process_memory_fraction(limit / total)


def free_what_is_unused() -> None:
    """A job that ended by an error is in the error's traceback, which refers to itself."""
    gc.collect()
    torch.cuda.empty_cache()


def on_the_gpu(strategy: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    return trained(solo_group(), strategy, CASE, "fp32", torch.device("cuda", 0))


def compare(rank: int) -> None:
    losses, weights = on_the_gpu("single")
    limit_to_eight_bytes_a_parameter()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        on_the_gpu("zero(2)")
    for strategy in ("zero(2, offload=True)", "zero(3, offload=True)"):
        free_what_is_unused()
        found, offloaded = on_the_gpu(strategy)
        assert found == pytest.approx(losses, abs=1e-5)
        for name, expected in weights.items():
            torch.testing.assert_close(offloaded[name], expected, rtol=1e-5, atol=1e-6)


def test_what_needs_more_than_the_gpu_has_trains_and_is_equal() -> None:
    forked_ranks(compare, 1)  # a process that has used its GPU has no forks which could
