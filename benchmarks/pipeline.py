"""What a step of a pipeline costs: Shoal, and torch.distributed.pipelining on the same stages.

`python -m benchmarks pipeline` starts two workers. Both train a copy of the same model, split at
the same block, on the same micro-batches. Beside them stands the least that such a step can take:
the passes of the slower stage, alone with its samples, and its bubble. Peak memory is what the
tensors of a step take at most, beside those that exist before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import shoal
from benchmarks.harness import (
    Timing,
    alternate,
    beside_peer,
    measure_in_workers,
    options_of_worker,
    peer_cells,
    say,
    spread,
    write_result,
)
from shoal.commands.examples.gpt import VOCABULARY, Block
from shoal.commands.launching import config_for
from shoal.commands.output import plain_table
from shoal.strategy.split_terms import Pp
from shoal.strategy.strategy import as_strategy

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
        if rank == 0:
            runner.step(batch[0])
        else:
            runner.step(target=batch[1], losses=[])
        optimizer.step()
        optimizer.zero_grad()  # behind the step, as Shoal does: both begin without gradients

    return step


def alone_step(
    model: nn.Sequential, split_at: int, rank: int, pp: Pp, batch: tuple[Tensor, Tensor]
) -> Callable[[], None]:
    """The passes and the update of one stage of two, which sends and receives nothing."""
    assert pp.microbatches is not None
    layers = list(model)
    stage = nn.Sequential(*(layers[:split_at] if rank == 0 else layers[split_at:]))
    tokens, targets = (part.chunk(pp.microbatches) for part in batch)
    received = [torch.randn(*each.shape, WIDTH, requires_grad=True) for each in tokens]
    optimizer = SGD(stage.parameters())

    def step() -> None:
        for number in range(len(tokens)):
            if rank == 0:
                out = stage(tokens[number])
                out.backward(received[number].detach())
            else:
                loss(stage(received[number]), targets[number]).backward()  # type: ignore[no-untyped-call]
                received[number].grad = None
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak_bytes(step: Callable[[], Any]) -> int:
    """What torch's allocator holds at most during a step, over what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    found: Any = profiler.profiler
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    peak: int = max(accumulate((event.nbytes() for event in events), initial=0))
    return peak


def _peaks(job: shoal.Job, ways: dict[str, Callable[[], Any]]) -> dict[str, list[int]]:
    """Of each stage."""
    found = {}
    for name, step in ways.items():
        peaks = torch.zeros(job.size, dtype=torch.int64)
        job.group.all_gather(peaks, torch.tensor([peak_bytes(step)])).wait()
        found[name] = peaks.tolist()
    return found


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
    alone = alone_step(copy.deepcopy(theirs), split_at, job.rank, pp, batch)
    peaks = _peaks(job, ways)
    timed = {**ways, "alone": alone}  # until both stages have ended
    barrier = partial(_barrier, job)
    times = alternate(timed, rounds, steps, barrier, barrier)
    bubble = (pp.microbatches + 1) / pp.microbatches
    bound = Timing.of([bubble * each for each in times.pop("alone")])
    return {
        "schedule": pp.schedule,
        "microbatches": pp.microbatches,
        "workers": job.size,
        "batch_size": batch_size,
        "peer": "torch.distributed.pipelining",
        "backend": dist.get_backend(),
        "peak_bytes": peaks,
        "bound": asdict(bound),
        **beside_peer(times),
    }


def _barrier(job: shoal.Job) -> None:
    job.group.barrier().wait()


def run(schedule: str, batch_size: int, microbatches: int, rounds: int, steps: int) -> Any:
    say(f"measuring {schedule} on 2")
    strategy = as_strategy(f'pp(2, schedule="{schedule}", microbatches={microbatches})')
    asked = {"batch-size": batch_size, "rounds": rounds, "steps": steps}
    config = config_for(strategy, device="cpu")
    return measure_in_workers("benchmarks.pipeline", asked, 2, config)


def tables(steps: list[Any], idle: list[Any]) -> list[Table]:
    heads = ["schedule", "shoal", "torch.distributed.\npipelining", "theirs /\nshoal"]
    times = [[r["schedule"], *peer_cells(r), spread(r["bound"], "_ms")] for r in steps]
    shares = [
        [r["schedule"], f"{r['simulated_idle']:.1%}", f"{r['traced_idle']:.1%}"] for r in idle
    ]
    peaks = [
        [r["schedule"], *(_megabytes(r["peak_bytes"][way]) for way in ("shoal", "peer"))]
        for r in steps
    ]
    title = "idle share of 4 stages, 8 micro-batches, layers that sleep"
    return [
        plain_table(
            "ms a step on 2 workers: median (quartiles)",
            [*heads, "slower stage alone,\nand the bubble"],
            times,
            left=1,
        ),
        plain_table("peak memory of a step, MB: each stage", heads[:-1], peaks, left=1),
        plain_table(title, ["schedule", "simulated", "traced"], shares, left=1),
    ]


def _megabytes(peaks: list[int]) -> str:
    return ", ".join(f"{peak / 1e6:.1f}" for peak in peaks)


def main() -> None:
    args = options_of_worker(batch_size=int, rounds=int, steps=int)
    write_result(lambda job: measure(job, args.batch_size, args.rounds, args.steps), args.result)


if __name__ == "__main__":
    main()
