"""DDP and its hooks, optimizers, FSDP, DTensor, tensor parallelism, pipelines, checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as Ddp

from tests.comm.features import Rank, feature, model, named, train, weights


def ddp(at: Rank, **options: Any) -> list[Tensor]:
    return train(Ddp(model(), **options), at)


named("ddp", ddp)
named("ddp find_unused_parameters", partial(ddp, find_unused_parameters=True))
named("ddp small buckets", partial(ddp, bucket_cap_mb=0.0001))
named("ddp without broadcast_buffers", partial(ddp, broadcast_buffers=False, init_sync=False))


def hooked(at: Rank, hook: Any, state: Any = None) -> list[Tensor]:
    net = Ddp(model())
    net.register_comm_hook(state() if callable(state) else state, hook)
    return train(net, at, steps=4)


def power_sgd() -> Any:
    return powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)


named("hook fp16", partial(hooked, hook=default_hooks.fp16_compress_hook))
named("hook PowerSGD", partial(hooked, hook=powerSGD_hook.powerSGD_hook, state=power_sgd))


@feature
def built_in_hook(at: Rank) -> list[Tensor]:
    net = Ddp(model())
    net._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
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
def zero_redundancy_optimizer(at: Rank) -> list[Any]:
    net = Ddp(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    found = train(net, at, optimizer)
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if at.rank == 0 else {}
    return [found, [each["exp_avg"] for each in state.values()]]


def sharded(at: Rank) -> Any:
    net = model()
    mesh = init_device_mesh("cpu", (at.size,))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    return net


@feature
def fully_shard_with_clipping(at: Rank) -> list[Any]:
    net = sharded(at)
    train(net, at)
    norm: Any = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    return [weights(net), norm.full_tensor(), [p.grad.full_tensor() for p in net.parameters()]]


@feature
def hybrid_shard(at: Rank) -> list[Tensor]:
    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (at.size // 2, 2), mesh_dim_names=("a", "b")))
    return train(net, at)


@feature
def fully_sharded_data_parallel(at: Rank) -> list[Tensor]:
    net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    train(net, at)
    with FullyShardedDataParallel.summon_full_params(net):
        return [parameter.detach().clone() for parameter in net.parameters()]


@feature
def dtensor(at: Rank) -> list[Tensor]:
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
    mesh = init_device_mesh("cpu", (at.size,))
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    net(data).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in net.parameters()]


@feature
def pipeline_1F1B(at: Rank) -> list[Any]:
    from torch.distributed import pipelining

    torch.manual_seed(at.rank)
    stage = pipelining.PipelineStage(nn.Linear(4, 4), at.rank, at.size, torch.device("cpu"))
    run = pipelining.Schedule1F1B(stage, at.size, loss_fn=nn.functional.mse_loss)
    losses: list[Tensor] = []
    rows = 2 * at.size
    if at.rank == 0:
        run.step(torch.ones(rows, 4))
    elif at.rank == at.size - 1:
        run.step(target=torch.zeros(rows, 4), losses=losses)
    else:
        run.step()
    return [[p.grad for p in stage.submod.parameters()], losses]


# ------------------------------------------------------------------ checkpoints


def saved(at: Rank, form: str) -> list[Any]:
    net = sharded(at)
    train(net, at)
    path = at.folder / form
    if form == "plain":
        dcp.save(net.state_dict(), checkpoint_id=path)
    else:
        kind = AsyncCheckpointerType(form)
        answer: Any = dcp.async_save(
            net.state_dict(), checkpoint_id=path, async_checkpointer_type=kind
        )
        answer.result()
    dist.barrier()
    other = sharded(at)
    state = {name: torch.zeros_like(value) for name, value in other.state_dict().items()}
    dcp.load(state, checkpoint_id=path)
    other.load_state_dict(state)
    return weights(other)


named("checkpoint", partial(saved, form="plain"))
named("checkpoint on a thread", partial(saved, form="thread"))
named("checkpoint in a process", partial(saved, form="process"))


@feature
def whole_state_from_rank_0(at: Rank) -> list[Any]:
    net = sharded(at)
    torch.manual_seed(7)
    given = {name: torch.randn(p.shape) for name, p in model().named_parameters()}
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(net, given if at.rank == 0 else {}, options=options)
    return weights(net)


@feature
def whole_states_of_model_and_optimizer(at: Rank) -> list[Any]:
    net = sharded(at)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    train(net, at, optimizer)
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = states.get_state_dict(net, optimizer, options=options)
    return [found[0], found[1].get("state", {})]
