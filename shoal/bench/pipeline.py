"""What a step of a pipeline costs: Shoal, and torch.distributed.pipelining on the same stages.

Run by `shoal bench pipeline` in each of two workers. Both train a copy of the same model, split at
the same block, on the same micro-batches.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

import shoal
from shoal.bench.alternate import Timing, alternate, ratios
from shoal.examples.gpt import VOCABULARY, Block
from shoal.strategy.split_terms import Pp

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
THEIRS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
WIDTH = 128
HEADS = 4
CONTEXT = 64
BLOCKS = 4


def model() -> nn.Sequential:
    """Blocks of a GPT between an embedding and a head."""
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        *(Block(WIDTH, HEADS) for _ in range(BLOCKS)),
        nn.Linear(WIDTH, VOCABULARY),
    )


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def torch_step(
    model: nn.Sequential, split_at: int, rank: int, pp: Pp, batch: tuple[Tensor, Tensor]
) -> Callable[[], None]:
    """A training step of torch.distributed.pipelining over the world of this process."""
    assert pp.microbatches is not None
    layers = list(model)
    module = nn.Sequential(*(layers[:split_at] if rank == 0 else layers[split_at:]))
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    runner = THEIRS[pp.schedule](stage, n_microbatches=pp.microbatches, loss_fn=loss)
    optimizer = SGD(module.parameters())

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            runner.step(batch[0])
        else:
            runner.step(target=batch[1], losses=[])
        optimizer.step()

    return step


def measure(job: shoal.Job, batch_size: int, rounds: int, steps: int) -> dict[str, Any]:
    pp = job.strategy.pp
    assert pp is not None and pp.microbatches is not None
    torch.manual_seed(0)
    ours = model()
    theirs = copy.deepcopy(ours)
    tokens = torch.randint(0, VOCABULARY, (batch_size, CONTEXT))
    batch = tokens, tokens.roll(-1, 1)
    step = job.step(ours, loss, optimizer=SGD)
    batch_of_job = next(iter(job.batches([batch])))
    split_at = int(step.shard.stages.cuts[0])  # type: ignore[attr-defined]
    ways: dict[str, Callable[[], Any]] = {
        "shoal": lambda: step(batch_of_job),
        "peer": torch_step(theirs, split_at, job.rank, pp, batch),
    }
    times = alternate(ways, rounds, steps, lambda: job.group.barrier().wait())
    ratio = ratios(times["shoal"], times["peer"])
    return {
        "schedule": pp.schedule,
        "microbatches": pp.microbatches,
        "workers": job.size,
        "batch_size": batch_size,
        "peer": "torch.distributed.pipelining",
        "backend": dist.get_backend(),
        "shoal": asdict(Timing.of(times["shoal"])),
        "theirs": asdict(Timing.of(times["peer"])),
        "ratio": {"median": ratio.median_ms, "low": ratio.low_ms, "high": ratio.high_ms},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--batch-size", "--rounds", "--steps"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()

    def train(job: shoal.Job) -> None:
        result = measure(job, args.batch_size, args.rounds, args.steps)
        if job.rank == 0:
            args.result.write_text(json.dumps(result))

    shoal.run(train)


if __name__ == "__main__":
    main()
