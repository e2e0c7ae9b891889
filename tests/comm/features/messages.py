"""Messages, works and groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.comm.features.feature import Rank, feature


def neighbors(at: Rank) -> tuple[int, int]:
    return (at.rank + 1) % at.size, (at.rank - 1) % at.size


@feature
def batch_isend_irecv(at: Rank) -> Tensor:
    after, before = neighbors(at)
    into = torch.zeros(6)
    sent = at.numbers()
    ops = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, into, before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return into


@feature
def object_lists_as_messages(at: Rank) -> list[Any]:
    given: list[Any] = [{"a": 1}, "b"] if at.rank == 0 else [None, None]
    if at.rank == 0:
        dist.send_object_list(given, dst=1)
    elif at.rank == 1:
        dist.recv_object_list(given, src=0)
    return given


@feature
def works(at: Rank) -> list[Any]:
    data = at.numbers()
    work: Any = dist.all_reduce(data, async_op=True)
    ended = work.wait(timedelta(seconds=20))
    return [ended, work.is_completed(), work.is_success(), data]


@feature
def futures(at: Rank) -> Any:
    work: Any = dist.all_reduce(at.numbers(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] * 2).wait()


@feature
def a_callback_that_communicates(at: Rank) -> Any:
    """Its operations have to be carried out while it waits for them."""

    def again(done: Any) -> Any:
        work: Any = dist.all_reduce(done.value()[0], async_op=True)
        return work.get_future().then(lambda second: second.value()[0] + 1).wait()

    first: Any = dist.all_reduce(at.numbers(), async_op=True)
    return first.get_future().then(again).wait()


@feature
def futures_of_gathers(at: Rank) -> Any:
    out = [torch.zeros(6) for _ in range(at.size)]
    work: Any = dist.all_gather(out, at.numbers(), async_op=True)
    work.get_future().wait()
    return out


@feature
def barriers(at: Rank) -> Any:
    work: Any = dist.barrier(async_op=True)
    work.wait()
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    return dist.barrier()


@feature
def coalescing_of_sums(at: Rank) -> list[Tensor]:
    data = [at.numbers(3), at.numbers(4)]
    with dist._coalescing_manager():  # type: ignore[attr-defined]
        for each in data:
            dist.all_reduce(each)
    return data


@feature
def coalescing_of_gathers(at: Rank) -> list[Tensor]:
    outs = [torch.zeros(3 * at.size), torch.zeros(4 * at.size)]
    with dist._coalescing_manager(async_ops=True) as manager:  # type: ignore[attr-defined]
        for out, count in zip(outs, (3, 4), strict=True):
            dist.all_gather_into_tensor(out, at.numbers(count))
    manager.wait()
    return outs


@feature
def coalescing_of_scatters(at: Rank) -> list[Tensor]:
    outs = [torch.zeros(3), torch.zeros(4)]
    with dist._coalescing_manager():  # type: ignore[attr-defined]
        for out in outs:
            dist.reduce_scatter_tensor(out, at.numbers(at.size * out.numel()))
    return outs


@feature
def new_group_of_its_members(at: Rank) -> Tensor:
    """Before other new groups: torch names it by how many groups a rank has seen."""
    data = at.numbers()
    if at.rank < 2:
        group = dist.new_group([0, 1], use_local_synchronization=True)
        dist.broadcast(data, group=group, group_src=1)
    return data


@feature
def new_group(at: Rank) -> list[Any]:
    members = [at.size - 1, 0]
    group = dist.new_group(members)
    data = at.numbers()
    if at.rank in members:
        dist.all_reduce(data, group=group)
    return [data, dist.get_process_group_ranks(group) if at.rank in members else None]


@feature
def new_subgroups(at: Rank) -> Tensor:
    group, _ = dist.new_subgroups(at.size // 2)
    data = at.numbers()
    dist.all_reduce(data, group=group)
    return data


@feature
def a_group_of_gloo_beside_it(at: Rank) -> Tensor:
    group = dist.new_group(backend="gloo")
    data = at.numbers()
    dist.all_reduce(data, group=group)
    return data


@feature
def split_group(at: Rank) -> Any:
    half = at.size // 2
    group = dist.split_group(split_ranks=[list(range(half)), list(range(half, at.size))])
    data = at.numbers()
    dist.all_reduce(data, group=group)
    return data


@feature
def a_timeout_of_its_own(at: Rank) -> str:
    group = dist.new_group(timeout=timedelta(milliseconds=50))
    if at.rank:
        dist.barrier()
        return ""
    try:
        dist.all_reduce(at.numbers(), group=group)
    except RuntimeError:
        dist.barrier()
        return "too late"
    return "ended"
