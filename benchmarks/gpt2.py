"""GPT-2 on one GPU beside what is predicted: time of a step, and memory by its passes.

    shoal cluster calibrate -o machine.toml
    python -m benchmarks.gpt2 --cluster machine.toml

A plain loop of PyTorch is predicted by the model's name; the same model under `job.step`, which
this file trains as a script, by its trace. The rows of docs/planner.md (`What runs`) are such ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from benchmarks.harness import say
from shoal.cluster import Cluster
from shoal.cluster.program import PYTORCH
from shoal.cluster.units import show_bytes, show_seconds
from shoal.commands.output import plain_table, show
from shoal.commands.subject import named_cluster, workload_of_command
from shoal.plan.predict import PlanSettings, predict
from shoal.plan.prediction import Prediction
from shoal.plan.workloads.model_presets import PRESETS, named_workload
from shoal.plan.workloads.transformer_block import TransformerSizes

_WARM_UP = 5
_STEPS = 20
_ADAMW = partial(torch.optim.AdamW, lr=1e-4)
_MEASURED = "measured: "  # begins the line of a run


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (one.transpose(1, 2) for one in heads.unbind(dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return x


class GPT2(nn.Module):
    """Without dropout; the head has the weights of the embedding."""

    def __init__(self, sizes: TransformerSizes):
        super().__init__()
        width = sizes.hidden
        self.tokens = nn.Embedding(sizes.vocab, width)
        self.positions = nn.Embedding(sizes.sequence, width)
        self.blocks = nn.ModuleList(Block(width, sizes.heads) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, sizes.vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(sizes: TransformerSizes, samples: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, sizes.vocab, (samples, sizes.sequence))
    return tokens, tokens.roll(-1, 1)


class Measured(NamedTuple):
    """Seconds of a step, and the most bytes of a step and of each of its passes."""

    step_s: float
    most_bytes: int
    passes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{_MEASURED}{self.step_s} {self.most_bytes}"


Pass = Callable[[], object]


def measured(passes: list[Pass]) -> Measured:
    """Each pass is a part of the step: forward, backward, update."""
    times_s = []
    most = [0] * len(passes)
    for number in range(_WARM_UP + _STEPS):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for place, run in enumerate(passes):
            if number < _WARM_UP:  # so that nothing of it is in the times
                torch.cuda.reset_peak_memory_stats()
            run()
            if number < _WARM_UP:
                most[place] = torch.cuda.max_memory_allocated()
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start_s)
    return Measured(statistics.median(times_s[_WARM_UP:]), max(most), tuple(most))


def plain_loop(name: str, samples: int, kernels: str) -> Measured:
    """As a person writes it today."""
    sizes = PRESETS[name]
    model: nn.Module = GPT2(sizes).cuda()
    if kernels == "compiled":
        model = torch.compile(model)  # type: ignore[assignment]
    inputs, targets = (one.cuda() for one in batch_of(sizes, samples))
    optimizer = _ADAMW(model.parameters())
    losses: list[Tensor] = []

    def forward() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            losses.append(loss_of(model(inputs), targets))

    def backward() -> None:
        losses.pop().backward()  # type: ignore[no-untyped-call]

    def update() -> None:
        optimizer.step()

    return measured([forward, backward, update])


def train(job: shoal.Job, name: str, samples: int) -> None:
    """The script: under job.step; it prints what it has measured."""
    sizes = PRESETS[name]
    step = job.step(GPT2(sizes), loss_of, optimizer=_ADAMW, precision="bf16")
    batch = next(iter(job.batches([batch_of(sizes, samples)])))
    for _ in range(_WARM_UP):  # the planner's trace ends with the first ones
        step(batch)
    print(measured([lambda: step(batch)]), flush=True)


def under_job_step(command: list[str]) -> Measured:
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    words = next(line for line in said.splitlines() if line.startswith(_MEASURED)).split()
    return Measured(float(words[1]), int(words[2]))


def predicted(name: str, samples: int, kernels: str, cluster: Cluster) -> Prediction:
    program = PYTORCH._replace(kernels=kernels)  # type: ignore[arg-type]
    workload = named_workload(name, program=program)
    assert workload is not None
    return predict(workload, cluster, "single", 1, PlanSettings(samples, program=program))


ROWS = (
    ("gpt-2", 16, "eager"),
    ("gpt-2", 24, "eager"),
    ("gpt-2-medium", 12, "eager"),
    ("gpt-2", 12, "compiled"),
)
SCRIPTS = (("gpt-2", 16), ("gpt-2-medium", 12))


def row_of(what: str, samples: int, one: Prediction, took: Measured) -> list[str]:
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
    parts = " + ".join(f"{getattr(one.memory, kind) / 1e9:.2f}" for kind in kinds)
    return [
        what,
        str(samples),
        show_seconds(took.step_s),
        f"{show_seconds(one.step_s)} ({one.step_s / took.step_s - 1:+.1%})",
        "yes" if one.low_s <= took.step_s <= one.high_s else "no",
        f"{show_bytes(took.most_bytes)}: {', '.join(f'{n / 1e9:.2f}' for n in took.passes)}",
        f"{show_bytes(one.memory.total)} ({one.memory.total / took.most_bytes - 1:+.1%}): {parts}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", default="h200")
    parser.add_argument("--train", choices=PRESETS)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--json", type=Path, help="a file for the rows")
    args = parser.parse_args()
    if args.train:
        shoal.run(partial(train, name=args.train, samples=args.samples))
        return
    cluster = named_cluster(args.cluster)
    rows = []
    for name, samples, kernels in ROWS:
        took = plain_loop(name, samples, kernels)
        one = predicted(name, samples, kernels, cluster)
        rows.append(row_of(f"{name}, {kernels}", samples, one, took))
        say(" | ".join(rows[-1]))
        gc.collect()
        torch.cuda.empty_cache()
    for name, samples in SCRIPTS:
        options = ["--train", name, "--samples", str(samples)]
        command = [sys.executable, str(Path(__file__)), *options]
        subject = workload_of_command(command)
        one = predict(subject.workload, cluster, "single", 1, _as_traced(subject.batch))
        rows.append(row_of(f"{name}, job.step", samples, one, under_job_step(command)))
        say(" | ".join(rows[-1]))
    heads = ["", "samples", "a step", "predicted", "in range", "GB: by passes", "predicted: kinds"]
    if args.json is not None:
        args.json.write_text(json.dumps({"heads": heads, "rows": rows}, indent=1))
    show({}, [plain_table(cluster.name, heads, rows, left=1)], False)


def _as_traced(batch: int) -> PlanSettings:
    return PlanSettings(batch, program=PYTORCH)


if __name__ == "__main__":
    main()
