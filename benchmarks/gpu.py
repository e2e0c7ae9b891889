"""Strategies on GPUs over NCCL, each beside torch's own way to do the same.

    ddp        DistributedDataParallel
    zero(3)    fully_shard (FSDP2)
    zero(2)    fully_shard(reshard_after_forward=False)
    tp(N)      parallelize_module (DTensor)
    pp(N)      torch.distributed.pipelining
    cp(N)      context_parallel: ring attention, the halves of a causal mask balanced

All train one GPT on the same tokens under autocast in bf16, one way after the other, in two rounds
(`fsdp_bf16` keeps all that it computes in bf16, which takes less memory and gives another loss). A
step ends when the GPU has finished it.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shoal
from benchmarks.gpu_ranks import how_placed, use_nccl
from benchmarks.harness import Timing, measure_in_workers, options_of_worker, say, write_result
from shoal.comm.group import Group, Op
from shoal.commands.examples.gpt import GPT, SIZES, VOCABULARY, next_token_loss
from shoal.commands.launching import config_for, strategy_for
from shoal.commands.output import plain_table
from shoal.strategy.strategy import parse
from shoal.train.job import Job

Step = Callable[[], Tensor | None]
WARM_UP = 3
ROUNDS = 2
MICROBATCHES = 4
_ADAMW = partial(torch.optim.AdamW, lr=1e-4, fused=True)
_BF16 = partial(torch.autocast, "cuda", dtype=torch.bfloat16)


def model_of(size: str) -> GPT:
    """The same on every rank; the last layer has weights of its own, which pipelining needs."""
    torch.manual_seed(0)
    model = GPT(SIZES[size])
    model.head.weight = nn.Parameter(model.tokens.weight.detach().clone())
    return model


def batch_of(size: str, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (rows, SIZES[size].context), generator=generator)
    return tokens.to(device), tokens.roll(-1, 1).to(device)


# ------------------------------------------------------------------------------ torch's ways


def _trained(model: nn.Module, batch: tuple[Tensor, Tensor], casts: bool = True) -> Step:
    kinds = {type(p) for p in model.parameters()}  # one call of the fused update takes one kind
    groups = [{"params": [p for p in model.parameters() if type(p) is k]} for k in kinds]
    optimizer = _ADAMW(groups)

    def step() -> Tensor:
        optimizer.zero_grad()
        with _BF16(enabled=casts):
            loss = next_token_loss(model(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def _rows_of(job: shoal.Job, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    rows = slice(job.rank, None, job.size)
    return batch[0][rows].contiguous(), batch[1][rows].contiguous()


def torch_ddp(job: shoal.Job, model: GPT, batch: tuple[Tensor, Tensor]) -> Step:
    return _trained(nn.parallel.DistributedDataParallel(model), _rows_of(job, batch))


def torch_fsdp(
    job: shoal.Job,
    model: GPT,
    batch: tuple[Tensor, Tensor],
    casts: bool = True,
    reshards: bool = True,
) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = DeviceMesh("cuda", list(range(job.size)))
    policy = MixedPrecisionPolicy(None if casts else torch.bfloat16, torch.float32)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
    return _trained(model, _rows_of(job, batch), casts)


def torch_fsdp_bf16(job: shoal.Job, model: GPT, batch: tuple[Tensor, Tensor]) -> Step:
    return torch_fsdp(job, model, batch, casts=False)


def torch_fsdp_zero2(job: shoal.Job, model: GPT, batch: tuple[Tensor, Tensor]) -> Step:
    return torch_fsdp(job, model, batch, reshards=False)


def torch_tp(job: shoal.Job, model: GPT, batch: tuple[Tensor, Tensor]) -> Step:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = DeviceMesh("cuda", list(range(job.size)))
    plan: dict[str, ParallelStyle] = {
        f"blocks.{number}.{name}": kind()
        for number in range(len(model.blocks))
        for names, kind in (
            (("attention.qkv", "mlp.up"), ColwiseParallel),
            (("attention.out", "mlp.down"), RowwiseParallel),
        )
        for name in names
    }
    return _trained(parallelize_module(model, mesh, plan), batch)


class _Stage(nn.Module):
    """Some blocks; the first stage has the embeddings, the last one the head."""

    def __init__(self, model: GPT, rank: int, size: int):
        super().__init__()
        first, last = (len(model.blocks) * n // size for n in (rank, rank + 1))
        self.blocks = model.blocks[first:last]
        self.tokens = model.tokens if rank == 0 else None
        self.positions = model.positions if rank == 0 else None
        self.norm = model.norm if rank == size - 1 else None
        self.head = model.head if rank == size - 1 else None
        self.index: Tensor | None = None  # positions of these tokens, where they are not the first

    def forward(self, x: Tensor) -> Tensor:
        with _BF16():
            if self.tokens is not None and self.positions is not None:
                index = self.index
                if index is None:
                    index = torch.arange(x.shape[1], device=x.device)
                x = self.tokens(x) + self.positions(index)
            for block in self.blocks:
                x = block(x)
            return x if self.norm is None or self.head is None else self.head(self.norm(x))


def torch_pp(job: shoal.Job, model: GPT, batch: tuple[Tensor, Tensor]) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    module = _Stage(model, job.rank, job.size).to(job.device)
    stage = PipelineStage(module, job.rank, job.size, job.device)
    is_last = job.rank == job.size - 1
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=next_token_loss)
    optimizer = _ADAMW(module.parameters())

    def step() -> Tensor | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given = () if job.rank else (batch[0],)
        schedule.step(*given, target=batch[1] if is_last else None, losses=losses)
        optimizer.step()
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    return step


def torch_cp(job: shoal.Job, model: GPT, batch: tuple[Tensor, Tensor]) -> Step:
    """Inside of `context_parallel` tokens, targets and positions are those of this rank."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = DeviceMesh("cuda", list(range(job.size)))
    module = _Stage(model, 0, 1)
    module.index = index = torch.arange(batch[0].shape[1], device=job.device)
    mine = batch[0].clone(), batch[1].clone()
    step = _trained(nn.parallel.DistributedDataParallel(module), mine)

    def sharded_step() -> Tensor | None:
        with context_parallel(mesh, buffers=[*mine, index], buffer_seq_dims=[1, 1, 0]):
            return step()

    return sharded_step


# ------------------------------------------------------------------------------ measuring

_PEERS: dict[str, tuple[Callable[..., Step], ...]] = {
    "ddp": (torch_ddp,),
    "zero(2)": (torch_fsdp_zero2,),
    "zero(3)": (torch_fsdp, torch_fsdp_bf16),
    "tp": (torch_tp,),
    "pp": (torch_pp,),
    "cp": (torch_cp,),
}


def measure(job: shoal.Job, strategies: Sequence[str], size: str, rows: int, steps: int) -> Any:
    batch = batch_of(size, rows * job.size, job.device)
    allocate_workspaces(job.device)
    found: list[dict[str, Any]] = []
    for round_ in range(ROUNDS):
        for strategy in strategies:
            peers = _PEERS.get(strategy) or _PEERS.get(strategy.split("(")[0], ())
            ways: list[tuple[str, Callable[[], Any]]] = [
                ("shoal", partial(_ours, job, strategy, size, batch, steps))
            ]
            ways += [(p.__name__, partial(_theirs, job, p, size, batch, steps)) for p in peers]
            for way, run in ways[:: -1 if round_ else 1]:
                held_gib = torch.cuda.memory_allocated() / 2**30  # left by the way before
                one = {"strategy": strategy, "way": way, "round": round_, **run()}
                one["peak_gib"] -= held_gib
                found.append(one)
                if job.rank == 0:
                    say(json.dumps(one))
                gc.collect()
                torch.cuda.empty_cache()
    return found


def allocate_workspaces(device: torch.device) -> None:
    """cuBLAS has 32 MiB for each thread that computes: else they count for the first way alone."""
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)
        (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]


def _ours(
    job: shoal.Job, strategy: str, size: str, batch: tuple[Tensor, Tensor], steps: int
) -> dict[str, Any]:
    parsed = parse(strategy)
    inner = Job(parsed, Group(job.group.executor), device=job.device, seed=0)
    with closing(inner):
        step = inner.step(
            model_of(size),
            next_token_loss,
            optimizer=_ADAMW,
            precision="bf16",
        )
        batches = inner.batches([batch])
        mine = next(iter(batches))
        return _timed(job, lambda: step(mine), steps)


def _theirs(
    job: shoal.Job,
    peer: Callable[..., Step],
    size: str,
    batch: tuple[Tensor, Tensor],
    steps: int,
) -> dict[str, Any]:
    model = model_of(size)
    if peer is not torch_pp:
        model = model.to(job.device)
    return _timed(job, peer(job, model, batch), steps)


def _timed(job: shoal.Job, step: Step, steps: int) -> dict[str, Any]:
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times_ms = []
    loss: Tensor | None = None
    for _ in range(steps):
        job.group.barrier().wait()
        start_s = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        times_ms.append(1e3 * (time.perf_counter() - start_s))
    losses = torch.zeros(2)  # their sum, and how many ranks have one
    if loss is not None:
        losses = torch.stack([loss.detach().float().cpu(), torch.tensor(1.0)])
    peak = torch.tensor([torch.cuda.max_memory_allocated() / 2**30])
    job.group.all_reduce(losses, Op.SUM).wait()
    job.group.all_reduce(peak, Op.MAX).wait()
    return {"times_ms": times_ms, "peak_gib": float(peak), "loss": float(losses[0] / losses[1])}


def run(strategies: Sequence[str], workers: int, size: str, rows: int, steps: int) -> Any:
    say(how_placed(workers))
    asked = {"strategies": json.dumps(strategies), "size": size, "rows": rows, "steps": steps}
    config = config_for(strategy_for("ddp", workers), device="cuda")
    return measure_in_workers("benchmarks.gpu", asked, workers, config)


def table_of(found: Sequence[dict[str, Any]], workers: int) -> Table:
    heads = ["strategy", "way", "ms a step\n(quartiles)", "peak GiB", "loss"]
    rows = []
    for strategy, way in dict.fromkeys((one["strategy"], one["way"]) for one in found):
        mine = [one for one in found if (one["strategy"], one["way"]) == (strategy, way)]
        timing = Timing.of([ms for one in mine for ms in one["times_ms"]])
        cell = f"{timing.median_ms:.1f}\n({timing.low_ms:.1f}–{timing.high_ms:.1f})"
        peak = f"{max(one['peak_gib'] for one in mine):.2f}"
        rows.append([strategy, way, cell, peak, f"{mine[0]['loss']:.4f}"])
    return plain_table(f"a step on GPUs: {how_placed(workers)}", heads, rows, left=2)


if __name__ == "__main__":
    use_nccl()
    args = options_of_worker(strategies=str, size=str, rows=int, steps=int)
    chosen = json.loads(args.strategies)
    write_result(lambda job: measure(job, chosen, args.size, args.rows, args.steps), args.result)
