"""What ranks over NCCL train under a strategy, and what one device does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.gpu_ranks import gpu_group
from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.commands.examples.gpt import GPT, Size
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.models import samples
from tests.seeds import seeded
from tests.splitting import GPT_OPTIONS, mlp, texts, whole
from tests.test_experts import Listed, mixture
from tests.test_experts import samples as rows

# absolute, of losses and of weights: bf16 has 8 bits, and sums of ranks another order
TOLERANCES = {"fp32": 2e-4, "bf16": 3e-2}


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    data: Any
    batch_size: int
    options: dict[str, Any]


@seeded(0)
def transformer() -> nn.Module:
    return GPT(Size(layers=4, width=16, heads=4, context=16, lr=1e-2))


_SGD = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
_TRANSFORMER = Case(transformer, texts(16, 16), 8, GPT_OPTIONS)
_EXPERTS = Case(partial(mixture, Listed), rows(32), 8, _SGD)
_PLAIN = Case(mlp, samples(44), 12, _SGD)


def case_of(strategy: str) -> Case:
    if "ep(" in strategy:
        return _EXPERTS
    return _TRANSFORMER if "tp(" in strategy or "cp(" in strategy else _PLAIN


def trained(
    group: Group, strategy: str, case: Case, precision: str, device: torch.device
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and what this rank has of the weights."""
    job = Job(parse(strategy), group, device=device, seed=3)
    with closing(job):
        options = {"loss": F.cross_entropy, **case.options, "precision": precision}
        step = job.step(case.make(), **options)
        batches = job.batches(case.data, case.batch_size)
        losses = [float(step(batch)) for batch in batches]
        return losses, {name: tensor.cpu() for name, tensor in whole(step).items()}


def differences(
    rank: int, size: int, strategies: tuple[str, ...], folder: Path
) -> dict[tuple[str, str], float]:
    """By strategy and precision, the largest one of a loss or a weight to one device."""
    found = {}
    with gpu_group(rank, size, folder) as group:
        device = group.executor.device
        assert device is not None
        for strategy, precision in product(strategies, TOLERANCES):
            case = case_of(strategy)
            losses, weights = trained(group, strategy, case, precision, device)
            expected, alone = trained(solo_group(), "single", case, precision, device)
            pairs = [(w, alone[n]) for n, w in weights.items() if w.shape == alone[n].shape]
            pairs.append((torch.tensor(losses), torch.tensor(expected)))
            found[strategy, precision] = max(float((a - b).abs().max()) for a, b in pairs)
    return found
