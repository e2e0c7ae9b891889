"""What a rehearsal costs: its processor time over that of its gradients, alternately in one run.

Gradients alone are forwards and backwards of as many samples as the virtual workers have, of one
model in a plain loop, without an update or a message. What the strategy computes with vectors, its
sums, updates and mixed weights, is timed by itself too: `added` is the ratio of all to both, what
the rehearsal adds. The first steps are not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import shoal
from benchmarks.harness import say
from shoal.cluster.presets import load_cluster
from shoal.commands.examples import clicks, digits, gpt
from shoal.errors import BadInput
from shoal.plan.step.slow_workers import Unevenness
from shoal.rehearse.pace import WorkerTimes
from shoal.rehearse.world import RehearsalSpec, rehearse
from shoal.replica.peer_sum import mix
from shoal.runtime.tables import plain_table
from shoal.schedules.mixing import mixing_for
from shoal.strategy.strategy import as_strategy
from shoal.strategy.sync_terms import Gossip

STRATEGIES = ("ddp", "ps", 'gossip(graph="ring")', 'ps(mode="async")')
WARM_UP = 3  # steps
CLUSTER = "dgx-a100"


@dataclass(frozen=True)
class Case:
    """What is trained, and the samples of its global batch."""

    batch_size: int
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    data: Callable[[], Dataset[Any]]


def _mlp() -> nn.Module:
    """5 million parameters."""
    return nn.Sequential(
        nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1408), nn.ReLU(), nn.Linear(1408, 10)
    )


def _noise() -> Dataset[Any]:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(8192, 1024), torch.randint(10, (8192,)))


_SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
CASES = {
    "digits": Case(64, digits.DigitsNet, F.cross_entropy, _SGD, lambda: digits.load_digits()[0]),
    "clicks": Case(
        256,
        lambda: clicks.ClicksNet(100_000, 16),
        F.binary_cross_entropy_with_logits,
        partial(torch.optim.Adagrad, lr=0.1),
        lambda: clicks.load_clicks(20_000, 100_000)[0],
    ),
    "gpt": Case(
        64,
        lambda: gpt.GPT(gpt.SIZES["small"]),
        gpt.next_token_loss,
        partial(torch.optim.AdamW, lr=1e-3),
        lambda: gpt.load_windows(gpt.SIZES["small"].context)[0],
    ),
    "mlp": Case(512, _mlp, F.cross_entropy, _SGD, _noise),
}


def run(
    names: list[str], strategies: list[str], workers: list[int], steps: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """One case after the other; ratios are medians over rounds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a rehearsal
    try:
        for name in names:
            for strategy in strategies:
                for n in workers:
                    try:
                        yield _measure(name, strategy, n, steps, rounds)
                    except BadInput as error:  # rows of clicks live on servers
                        say(f"{name}, {strategy}: {error}")
    finally:
        torch.set_num_threads(before)


def _measure(name: str, strategy: str, workers: int, steps: int, rounds: int) -> dict[str, Any]:
    case, data = CASES[name], CASES[name].data()
    ratios, added, whole, alone, vectors = [], [], [], [], []
    for _ in range(rounds):
        alone.append(gradients_alone(case, data, workers, steps))
        vectors.append(arithmetic_alone(case, strategy, workers, steps))
        whole.append(rehearsed(case, data, strategy, workers, steps))
        ratios.append(whole[-1] / alone[-1])
        added.append(whole[-1] / (alone[-1] + vectors[-1]))
    computed, all_s = (
        statistics.median(alone) + statistics.median(vectors),
        statistics.median(whole),
    )
    return {
        "case": name,
        "strategy": strategy,
        "workers": workers,
        "batch_size": case.batch_size,
        "steps": steps,
        "gradients_cpu_ms": 1e3 * statistics.median(alone) / steps,
        "arithmetic_cpu_ms": 1e3 * statistics.median(vectors) / steps,
        "rehearsal_cpu_ms": 1e3 * all_s / steps,
        "rest_cpu_ms": 1e3 * (all_s - computed) / steps,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "added": statistics.median(added),
    }


def gradients_alone(case: Case, data: Dataset[Any], workers: int, steps: int) -> float:
    """CPU seconds for all workers and steps."""
    torch.manual_seed(0)
    model = case.model()
    rows = max(1, case.batch_size // workers)
    tensors = data.tensors  # type: ignore[attr-defined]
    pieces = [tuple(t[i * rows : (i + 1) * rows] for t in tensors) for i in range(workers)]
    began_s = 0.0
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            began_s = time.process_time()
        for inputs, targets in pieces:
            case.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            for p in model.parameters():
                p.grad = None
            for module in model.modules():
                if isinstance(module, shoal.Embedding):
                    module.discard()
    return time.process_time() - began_s


def arithmetic_alone(case: Case, strategy: str, workers: int, steps: int) -> float:
    """CPU seconds of sums of gradients, updates and mixed weights."""
    models = [case.model() for _ in range(workers)]
    flat = [[p.detach() for p in model.parameters() if p.requires_grad] for model in models]
    grads = [[torch.randn_like(tensor) for tensor in tensors] for tensors in flat]
    term = as_strategy(strategy).sync_for(workers)
    each = isinstance(term, Gossip) or getattr(term, "mode", "sync") == "async"
    optimizers = [case.optimizer(model.parameters()) for model in models[: workers if each else 1]]
    mixed = [[torch.empty_like(tensor) for tensor in tensors] for tensors in flat]
    mixing = mixing_for(term.graph, workers) if isinstance(term, Gossip) else None
    began_s = 0.0
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            began_s = time.process_time()
        for others in () if each else grads[1:]:
            for total, other in zip(grads[0], others, strict=True):
                total.add_(other)
        for optimizer, model, own in zip(optimizers, models, grads, strict=False):
            for p, grad in zip(model.parameters(), own, strict=True):
                p.grad = grad
            optimizer.step()
        for rank, targets in enumerate(() if mixing is None else mixed):
            assert mixing is not None
            heard = mixing.heard_by(rank, number).items()
            for place, target in enumerate(targets):
                mix(target.view(-1), [(flat[peer][place].view(-1), share) for peer, share in heard])
    return time.process_time() - began_s


def rehearsed(case: Case, data: Dataset[Any], strategy: str, workers: int, steps: int) -> float:
    """CPU seconds from the end of the warm-up to that of the last step of rank 0."""
    moments: dict[int, float] = {}

    def train(job: shoal.Job) -> None:
        step = job.step(case.model(), case.loss, optimizer=case.optimizer)
        for batch in job.batches(data, batch_size=case.batch_size, steps=limit, epochs=10_000):
            step(batch)
            if job.rank == 0:
                moments[job.steps] = time.process_time()

    limit = WARM_UP + steps
    rows = max(1, case.batch_size // workers)
    times = WorkerTimes(rows, (0.004,), (0.008,), (0.004,), 0.001, 0.0005)
    spec = RehearsalSpec(as_strategy(strategy), workers, load_cluster(CLUSTER), times, Unevenness())
    rehearse(train, spec)
    first, last = sorted(moments)[WARM_UP - 1], max(moments)
    return moments[last] - moments[first]


def table_of(results: list[dict[str, Any]]) -> Table:
    heads = ["case", "strategy", "workers", "batch", "gradients", "arithmetic", "rehearsal"]
    heads += ["rest", "ratio", "added"]
    rows = [
        [
            found["case"],
            found["strategy"],
            str(found["workers"]),
            str(found["batch_size"]),
            f"{found['gradients_cpu_ms']:.1f}",
            f"{found['arithmetic_cpu_ms']:.1f}",
            f"{found['rehearsal_cpu_ms']:.1f}",
            f"{found['rest_cpu_ms']:.1f}",
            f"{found['ratio']:.2f}",
            f"{found['added']:.2f}",
        ]
        for found in results
    ]
    return plain_table("CPU, ms a step of all workers: median over rounds", heads, rows, left=2)
