"""Every executor that the conformance suite runs on, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shoal.comm.counting import SentBytes
from shoal.comm.executor import Executor
from shoal.comm.executors.scheduled import Scheduled
from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.comm.tracing import Traced
from shoal.runtime.trace import Recorder
from shoal.schedules.collectives.cost import Link
from shoal.transport.shm.segment import is_built
from shoal.transport.tcp.transport import is_built as is_tcp_built
from tests.comm.conformance import Case, Findings
from tests.comm.hosts import on_hosts
from tests.comm.shm import on_shm_threads
from tests.comm.threads import on_threads
from tests.products import few_or_all
from tests.transport.tcp import on_tcp

Run = Callable[[Case], list[Findings]]  # the findings of every rank
Wrap = Callable[[Executor], Group]


def solo(case: Case) -> list[Findings]:
    return [case(solo_group())]


def scheduled(size: int, background: bool, wrap: Wrap = Group) -> Run:
    def run(case: Case) -> list[Findings]:
        findings = on_threads(
            size, lambda t: case(wrap(Scheduled(t, link=Link(), background=background)))
        )
        for thread in threading.enumerate():  # it is about to end when the last work is done
            if thread.name == "collectives":
                thread.join()
        return findings

    return run


def scheduled_tcp(size: int) -> Run:
    def run(case: Case) -> list[Findings]:
        body = lambda t: case(Group(Scheduled(t, link=Link(), background=True)))  # noqa: E731
        return [raise_errors(found) for found in on_tcp(size, body)]

    return run


def raise_errors(found: Findings | BaseException) -> Findings:
    if isinstance(found, BaseException):
        raise found
    return found


def shared_memory(size: int, wrap: Wrap = Group) -> Run:
    return lambda case: on_shm_threads(size, lambda group: case(wrap(group.executor)))


def hierarchical(where: str, between: str | None = None) -> Run:
    return lambda case: on_hosts(where, case, between=between)


def traced(executor: Executor) -> Group:
    return Group(Traced(executor, Recorder(executor.rank, 0)))


def counted(executor: Executor) -> Group:
    return Group(executor, sent=SentBytes())


ON_WAIT = few_or_all((1, 3), (1, 2, 3, 5))
IN_BACKGROUND = few_or_all((2, 5), (1, 2, 3, 5))
EXECUTORS: dict[str, Run] = {
    "solo": solo,
    **{f"scheduled on wait, {size} ranks": scheduled(size, False) for size in ON_WAIT},
    **{f"scheduled in background, {size} ranks": scheduled(size, True) for size in IN_BACKGROUND},
    "scheduled, traced": scheduled(2, True, traced),
    "scheduled, counted": scheduled(3, True, counted),
}
if is_tcp_built():
    EXECUTORS |= {
        f"scheduled over TCP, {size} ranks": scheduled_tcp(size)
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
        **{
            f"hierarchical over Gloo, hosts {hosts}": hierarchical(hosts, "gloo")
            for hosts in few_or_all(("aab",), ("aabb", "abab", "aab"))
        },
    }


def cannot_run(name: str, case: str) -> bool:
    """Nothing goes on before it is waited for."""
    return "on wait" in name and case == "duplicates_are_waited_for_in_contrary_orders"
