"""DDP with its options and hooks, optimizers, FSDP2, DTensor, tensor parallelism, pipelines."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as Ddp

from tests.comm.features.feature import Rank, batch, feature, model, named, train, weights

OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp static_graph": {"static_graph": True},
    "ddp find_unused_parameters": {"find_unused_parameters": True},
    "ddp gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "ddp small buckets": {"bucket_cap_mb": 0.0001},
    "ddp without broadcast_buffers": {"broadcast_buffers": False, "init_sync": False},
}


def ddp(at: Rank, **options: Any) -> list[Tensor]:
    return train(Ddp(model(), **options), at)


for each, options in OPTIONS.items():
    named(each, partial(ddp, **options))


@feature
def ddp_mixed_precision(at: Rank) -> list[Tensor]:
    from torch.nn.parallel.distributed import _MixedPrecision

    return ddp(
        at,
        mixed_precision=_MixedPrecision(
            param_dtype=torch.float64, reduce_dtype=torch.float64, buffer_dtype=torch.float64
        ),
    )


def hooked(at: Rank, hook: Any, state: Any = None) -> list[Tensor]:
    net = Ddp(model())
    net.register_comm_hook(state() if callable(state) else state, hook)
    return train(net, at, steps=4)


def power_sgd() -> Any:
    return powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)


for each in ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"):
    named(f"hook {each}", partial(hooked, hook=getattr(default_hooks, each)))
for each in ("fp16_compress_wrapper", "bf16_compress_wrapper"):
    wrapper = getattr(default_hooks, each)
    named(f"hook {each}", partial(hooked, hook=wrapper(default_hooks.allreduce_hook)))
    wrapped = wrapper(powerSGD_hook.powerSGD_hook)
    named(f"hook PowerSGD in {each}", partial(hooked, hook=wrapped, state=power_sgd))
named("hook PowerSGD", partial(hooked, hook=powerSGD_hook.powerSGD_hook, state=power_sgd))


def built_in(at: Rank, name: str) -> list[Tensor]:
    net = Ddp(model())
    net._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
    return train(net, at)


named("built-in hook ALLREDUCE", partial(built_in, name="ALLREDUCE"))
named("built-in hook FP16_COMPRESS", partial(built_in, name="FP16_COMPRESS"))


@feature
def ddp_no_sync(at: Rank) -> list[Tensor]:
    net = Ddp(model())
    with net.no_sync():
        net(batch(at)).square().mean().backward()
    return train(net, at)


@feature
def ddp_join(at: Rank) -> list[Tensor]:
    net = Ddp(model())
    with net.join():
        train(net, at, steps=2 + at.rank)
    return weights(net)


@feature
def batch_norm_buffers(at: Rank) -> list[Tensor]:
    net = Ddp(nn.Sequential(model(), nn.BatchNorm1d(4)))
    train(net, at)
    return [*weights(net), *net.buffers()]


@feature
def sync_batch_norm(at: Rank) -> list[Tensor]:
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(model(), nn.BatchNorm1d(4)))
    return train(Ddp(net), at)


@feature
def zero_redundancy_optimizer(at: Rank) -> list[Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = Ddp(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    found = train(net, at, optimizer)
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if at.rank == 0 else {}
    return [found, [each["exp_avg"] for each in state.values()]]


@feature
def join_of_ddp_and_zero(at: Rank) -> list[Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = Ddp(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    with Join([net, optimizer]):
        train(net, at, optimizer, steps=2 + at.rank)
    return weights(net)


@feature
def model_averaging(at: Rank) -> list[Tensor]:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    net = model()
    averager = PeriodicModelAverager(period=1)
    train(net, at)
    averager.average_parameters(net.parameters())
    return weights(net)


def sharded(at: Rank, **options: Any) -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    net = model()
    mesh = init_device_mesh("cpu", (at.size,))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh, **options)
    return train(net, at)


named("fully_shard", sharded)
named("fully_shard without resharding", partial(sharded, reshard_after_forward=False))


@feature
def fully_shard_with_clipping(at: Rank) -> list[Any]:
    from torch.distributed.fsdp import fully_shard

    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (at.size,)))
    net(batch(at)).square().mean().backward()
    norm: Any = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    return [norm.full_tensor(), [p.grad.full_tensor() for p in net.parameters()]]


@feature
def hybrid_shard(at: Rank) -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (at.size // 2, 2), mesh_dim_names=("a", "b")))
    return train(net, at)


@feature
def fully_sharded_data_parallel(at: Rank) -> list[Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    train(net, at)
    with FullyShardedDataParallel.summon_full_params(net):
        return [parameter.detach().clone() for parameter in net.parameters()]


@feature
def dtensor(at: Rank) -> list[Tensor]:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (at.size,))
    data = torch.arange(24.0).view(4, 6)
    rows = distribute_tensor(data, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product: Any = rows @ columns.redistribute(mesh, [Replicate()]).t()
    summed = rows.sum(0)
    assert isinstance(summed.placements[0], Partial)
    return [product.full_tensor(), columns.to_local(), summed.full_tensor(), rows.mean()]


@feature
def tensor_parallel(at: Rank) -> list[Tensor]:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (at.size,))
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    net(data).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in net.parameters()]


@feature
def sequence_parallel(at: Rank) -> Any:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        PrepareModuleInput,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (at.size,))
    net = nn.Sequential(nn.LayerNorm(4))
    plan = {
        "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1)),
        "0": SequenceParallel(),
    }
    parallelize_module(net, mesh, plan)
    return net(at.numbers(8).view(1, 2, 4))


def pipelined(at: Rank, schedule: str) -> list[Any]:
    from torch.distributed import pipelining

    torch.manual_seed(at.rank)
    stage = pipelining.PipelineStage(nn.Linear(4, 4), at.rank, at.size, torch.device("cpu"))
    run = getattr(pipelining, schedule)(stage, at.size, loss_fn=nn.functional.mse_loss)
    losses: list[Tensor] = []
    rows = 2 * at.size
    if at.rank == 0:
        run.step(torch.ones(rows, 4))
    elif at.rank == at.size - 1:
        run.step(target=torch.zeros(rows, 4), losses=losses)
    else:
        run.step()
    return [[p.grad for p in stage.submod.parameters()], losses]


named("pipeline GPipe", partial(pipelined, schedule="ScheduleGPipe"))
named("pipeline 1F1B", partial(pipelined, schedule="Schedule1F1B"))
