"""One of two processes: gradients of our pipeline beside those of torch.distributed.pipelining.

`python -m tests.replica.pipelining RANK SIZE FOLDER`; it leaves what it found in FOLDER/RANK.json.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.replica.beside_torch import main

MICROBATCHES = 4
THEIRS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(6, 10), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 8), nn.Tanh()),
        *(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3)),
    )


class Noting(torch.optim.Optimizer):
    """Keeps the gradients, changes nothing."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]):
        self.named = list(named)
        self.grads: dict[str, Tensor] = {}
        super().__init__([p for _, p in self.named], {})

    def step(self, closure: Any = None) -> None:
        self.grads = {name: p.grad.clone() for name, p in self.named if p.grad is not None}


def ours(group: Group, schedule: str, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], str]:
    strategy = parse(f'pp(2, schedule="{schedule}", microbatches={MICROBATCHES})')
    job = Job(strategy, group, device=torch.device("cpu"))
    step = job.step(model(), F.cross_entropy, optimizer=Noting)
    for batch in job.batches([(x, y)]):
        step(batch)
    optimizer = step.update.optimizer
    assert isinstance(optimizer, Noting)
    return optimizer.grads, step.shard.stages.cuts[0]  # type: ignore[attr-defined]


def theirs(rank: int, schedule: str, cut: int, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """On the same stages: layers before the cut, and from it on."""
    whole = copy.deepcopy(model())
    first = 0 if rank == 0 else cut
    module = nn.Sequential(*(whole[:cut] if rank == 0 else whole[cut:]))
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    runner = THEIRS[schedule](stage, n_microbatches=MICROBATCHES, loss_fn=F.cross_entropy)
    if rank == 0:
        runner.step(x)
    else:
        runner.step(target=y, losses=[])
    found = {}
    for name, p in module.named_parameters():
        place, _, rest = name.partition(".")
        assert p.grad is not None
        found[f"{first + int(place)}.{rest}"] = p.grad
    return found


def compare(group: Group, schedule: str) -> float:
    """The largest difference of an element."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 6, generator=generator)
    y = torch.randint(0, 3, (16,), generator=generator)
    mine, cut = ours(group, schedule, x, y)
    other = theirs(group.rank, schedule, int(cut), x, y)
    assert list(mine) == list(other) and mine
    return max(float((mine[name] - other[name]).abs().max()) for name in mine)


if __name__ == "__main__":
    main(lambda group: {schedule: compare(group, schedule) for schedule in THEIRS})
