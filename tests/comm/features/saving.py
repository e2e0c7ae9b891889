"""torch.distributed.checkpoint."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.comm.features.feature import Rank, feature, model, named, train, weights


def sharded(at: Rank) -> Any:
    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (at.size,)))
    return net


def loaded(at: Rank, path: Any) -> list[Any]:
    other = sharded(at)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = other.state_dict()
    dcp.load(state, checkpoint_id=path)
    other.load_state_dict(state)
    return weights(other)


@feature
def checkpoint_of_shards(at: Rank) -> list[Any]:
    net = sharded(at)
    train(net, at)
    dcp.save(net.state_dict(), checkpoint_id=at.folder / "plain")
    return loaded(at, at.folder / "plain")


def saved_asynchronously(at: Rank, form: str) -> list[Any]:
    net = sharded(at)
    train(net, at)
    options: dict[str, Any] = {}
    if form == "process":
        options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
    if form == "stager":
        options["async_stager"] = DefaultStager(StagingOptions(False, False, False, False))
    path = at.folder / f"async-{form}"
    answer: Any = dcp.async_save(net.state_dict(), checkpoint_id=path, **options)
    getattr(answer, "upload_completion", answer).result()
    dist.barrier()
    return loaded(at, path)


named("async_save on a thread", partial(saved_asynchronously, form="thread"))
named("async_save with a stager", partial(saved_asynchronously, form="stager"))
named("async_save in a process", partial(saved_asynchronously, form="process"))


@feature
def whole_state_from_rank_0(at: Rank) -> list[Any]:
    net = sharded(at)
    torch.manual_seed(7)
    given = {name: torch.randn(p.shape) for name, p in model().named_parameters()}
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(net, given if at.rank == 0 else {}, options=options)
    return weights(net)


@feature
def whole_state_from_rank_0_of_plain_models(at: Rank) -> list[Any]:
    net = model()
    given = {name: torch.full(p.shape, 3.0) for name, p in net.named_parameters()}
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
