"""One conformance suite, against every executor, on threads; and over Gloo on processes."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.comm.executor import Executor
from shoal.comm.executors.scheduled import Scheduled
from shoal.comm.executors.solo import solo_group
from shoal.comm.executors.torch import Torch
from shoal.comm.group import Group
from shoal.comm.tracing import Traced
from shoal.comm.transport.shm.segment import is_built
from shoal.comm.transport.tcp.transport import is_built as is_tcp_built
from shoal.comm.transport.transport import TorchTransport, Transport
from shoal.errors import PeerLost
from shoal.runtime.trace import Recorder, SentBytes
from shoal.schedules.collectives.cost import Link
from tests.comm.conformance import CASES, Case, Findings, check
from tests.comm.threads import on_hosts, on_shm_threads, on_tcp, on_threads
from tests.comm.torch_ranks import forked_ranks
from tests.products import few_or_all
from tests.rehearse.worlds import run_virtual

Run = Callable[[Case], list[Findings]]  # the findings of every rank
Wrap = Callable[[Executor], Group]
TIMEOUT = timedelta(seconds=30)
every_case = pytest.mark.parametrize("case", CASES)


def scheduled(
    size: int, wrap: Wrap = Group, background: bool = True, world: Any = on_threads
) -> Run:
    def group(transport: Transport) -> Group:
        return wrap(Scheduled(transport, link=Link(), background=background))

    def run(case: Case) -> list[Findings]:
        findings = world(size, lambda transport: case(group(transport)))
        for thread in threading.enumerate():  # it is about to end when the last work is done
            if thread.name == "collectives":
                thread.join()
        return findings  # type: ignore[no-any-return]

    return run


def shared_memory(size: int, wrap: Wrap = Group) -> Run:
    return lambda case: on_shm_threads(size, lambda group: case(wrap(group.executor)))


def hierarchical(where: str) -> Run:
    return lambda case: on_hosts(where, case)


def virtual(size: int) -> Run:
    return lambda case: run_virtual(size, case)


def traced(executor: Executor) -> Group:
    return Group(Traced(executor, Recorder(executor.rank, 0)))


def counted(executor: Executor) -> Group:
    return Group(executor, sent=SentBytes())


EXECUTORS: dict[str, Run] = {
    "solo": lambda case: [case(solo_group())],
    **{
        f"scheduled on wait, {size} ranks": scheduled(size, background=False)
        for size in few_or_all((1, 3), (1, 2, 3, 5))
    },
    **{
        f"scheduled in background, {size} ranks": scheduled(size)
        for size in few_or_all((2, 5), (1, 2, 3, 5))
    },
    **{f"virtual, {size} ranks": virtual(size) for size in few_or_all((1, 3), (1, 2, 3, 5))},
    "scheduled, traced": scheduled(2, traced),
    "scheduled, counted": scheduled(3, counted),
}
if is_tcp_built():
    EXECUTORS |= {
        f"scheduled over TCP, {size} ranks": scheduled(size, world=on_tcp)
        for size in few_or_all((3,), (2, 3, 5))
    }
if is_built():
    EXECUTORS |= {
        **{f"shared memory, {size} ranks": shared_memory(size) for size in (1, 2, 3)},
        "shared memory, traced": shared_memory(2, traced),
        "shared memory, counted": shared_memory(2, counted),
        **{
            f"hierarchical, hosts {hosts}": hierarchical(hosts)
            for hosts in few_or_all(("abab", "aab"), ("aabb", "abab", "aab", "abc"))
        },
    }


@every_case
@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_executor(executor: str, case: str) -> None:
    if "on wait" in executor and case == "duplicates_are_waited_for_in_contrary_orders":
        pytest.skip("nothing goes on before it is waited for")
    for found in EXECUTORS[executor](CASES[case]):
        if isinstance(found, BaseException):
            raise found
        check(found)


def gloo_rank(rank: int, folder: Path) -> dict[str, Any]:
    """What goes wrong, by case: in the world, in a pair of it, with schedules over its messages."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3, timeout=TIMEOUT
    )
    world = Group(Torch(dist.group.WORLD))  # type: ignore[arg-type]
    report: dict[str, Any] = {"world": errors(world)}
    pair = dist.new_group([1, 2], timeout=TIMEOUT)
    if rank:
        report["pair"] = errors(Group(Torch(pair)))
    messages = Scheduled(TorchTransport(), link=Link(), background=True)
    report["messages"] = errors(Group(messages))
    world.barrier().wait()
    if rank < 2:  # rank 2 ends without a word to the others
        with pytest.raises(PeerLost) as lost:
            world.all_reduce(torch.zeros(3)).wait()
        report["lost"] = str(lost.value)
    return report


def errors(group: Group) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, case in CASES.items():
        try:
            found[name] = check(case(group))
        except Exception:
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one world of processes reports; they have all ended."""
    folder = tmp_path_factory.mktemp("gloo")
    return forked_ranks(lambda rank: gloo_rank(rank, folder), 3)


@every_case
@pytest.mark.parametrize("where", ["world", "pair", "messages"])
def test_torch_executor_over_gloo(gloo: list[dict[str, Any]], where: str, case: str) -> None:
    """The world has 3 ranks; the pair has 2, whose ranks inside are not those in the world."""
    outcomes = [report[where][case] for report in gloo if where in report]
    assert len(outcomes) == (2 if where == "pair" else 3)
    for error in outcomes:
        if where == "pair" and "subgroups" in case:
            assert error is not None and "cut out of the whole world" in error
        else:
            assert error is None, error


def test_a_process_that_goes_away_is_a_lost_peer(gloo: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(gloo[:-1]):
        assert report["lost"].startswith(f"rank {rank} lost a peer in all_reduce #")
