from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.thread_transport import Mailboxes, ThreadTransport
from shoal.comm.executors.scheduled import Scheduled
from shoal.comm.group import Group, Op
from shoal.comm.tracing import Traced
from shoal.comm.transport.transport import Work
from shoal.errors import BadInput, PeerLost
from shoal.observe.time_shares import time_shares
from shoal.runtime.trace import Recorder, SentBytes
from shoal.schedules.collectives import Collective, Transfer
from shoal.schedules.collectives.catalog import algorithms, build, kinds
from shoal.schedules.collectives.cost import Link, cheapest
from shoal.schedules.collectives.proof import ProofFailed
from tests.comm.cases import call, cases, check, group_for
from tests.comm.threads import on_hosts, on_shm_threads, on_threads
from tests.conftest import World, run_world
from tests.products import few_or_all

EVERY = [(kind, name) for kind in kinds() for name in algorithms(kind)]
RING = {"all_reduce": "ring"}
MANY_RANKS = few_or_all([1, 2, 3, 6, 8], [*range(1, 10)])


@pytest.mark.parametrize(("kind", "name"), EVERY)
@settings(max_examples=few_or_all(3, 6), derandomize=True, database=None)
@given(data=st.data())
def test_every_algorithm_gives_the_right_numbers_on_1_to_9_ranks(
    kind: str, name: str, data: st.DataObject
) -> None:
    case = data.draw(cases(kind, name))
    for size in MANY_RANKS:
        results = on_threads(size, lambda transport: call(group_for(transport, case), case))
        for rank, got in enumerate(results):
            check(case, got, rank, size)
        if kind == "all_reduce" and build(kind, name, size).same_bits:
            assert all(torch.equal(got, results[0]) for got in results)


def swap(ranks: int) -> Collective:
    """All-reduce for two: both send, both add."""
    return Collective("swap", 2, 1, [[Transfer(0, 1, 0, True), Transfer(1, 0, 0, True)]])


def half_a_swap(ranks: int) -> Collective:
    return Collective("half a swap", 2, 1, [[Transfer(0, 1, 0, True)]])


def summed(group: Group, numel: int = 5) -> list[float]:
    data = torch.arange(numel, dtype=torch.float64) + group.rank
    group.all_reduce(data).wait()
    return data.tolist()  # type: ignore[no-any-return]


def test_a_schedule_of_ones_own_runs() -> None:
    results = on_threads(2, lambda t: summed(Group(Scheduled(t, {"all_reduce": swap}))))
    assert results == [[1.0, 3.0, 5.0, 7.0, 9.0]] * 2


def test_a_wrong_schedule_of_ones_own_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ProofFailed, match="rank 0 lacks the contribution of rank 1"):
        on_threads(2, lambda t: Group(Scheduled(t, {"all_reduce": half_a_swap})))


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"all_reduce": "rong"}, "did you mean 'ring'"),
        ({"all_reduce": lambda ranks: swap(2)}, "over 2 ranks, not for all_reduce over 3"),
        ({"all_reduce": "bruck"}, "no algorithm 'bruck' for all_reduce"),
        ({"allreduce": "ring"}, "did you mean 'all_reduce'"),
        ({"broadcast": swap}, "is for all_reduce over 2 ranks, not for broadcast over 3"),
    ],
)
def test_an_impossible_choice_is_refused(algorithm: object, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        on_threads(3, lambda t: Group(Scheduled(t, algorithm)))  # type: ignore[arg-type]


def test_auto_takes_the_cheapest_for_the_size() -> None:
    link = Link(alpha_s=1e-5, beta_s_per_byte=1e-9)
    assert cheapest("all_reduce", 16, 64, link) == "doubling"
    assert cheapest("all_reduce", 16, 1 << 26, link) in ("ring", "halving", "torus", "hierarchical")
    assert cheapest("broadcast", 16, 64, link) == "tree"
    assert cheapest("broadcast", 16, 1 << 28, link) in ("ring", "scatter_gather")
    assert cheapest("all_to_all", 16, 64, link) == "bruck"
    assert cheapest("all_to_all", 16, 1 << 28, link) == "shift"


def test_auto_measures_the_link_first_and_all_ranks_know_the_same() -> None:
    def work(transport: ThreadTransport) -> tuple[list[float], Link | None]:
        executor = Scheduled(transport)
        return summed(Group(executor)), executor.link

    results = on_threads(4, work)
    assert all(numbers == [6.0, 10.0, 14.0, 18.0, 22.0] for numbers, _ in results)
    links = {link for _, link in results}
    assert len(links) == 1
    (link,) = links
    assert link is not None and 0 < link.alpha_s < 1 and 0 <= link.beta_s_per_byte < 1e-3


@pytest.mark.parametrize("run", [run_world, on_shm_threads])
def test_a_subgroup_keeps_the_order_of_its_ranks(run: World) -> None:
    groups = run(3, lambda group: getattr(group.subgroup([2, 0]), "rank", None))
    assert groups == [1, None, 0]


def test_segments_make_a_chain_a_pipe() -> None:
    """Rank 0 sends its last segment only after the first one has passed rank 2."""
    passed = threading.Event()
    sent = 0

    class Watched(ThreadTransport):
        def send(self, data: torch.Tensor, dst: int, tag: int) -> Work:
            nonlocal sent
            if self.rank == 2:
                passed.set()
            if self.rank == 0:
                sent += 1
                assert sent < 64 or passed.wait(60)
            return super().send(data, dst, tag)

    def work(transport: ThreadTransport) -> None:
        watched = Watched(transport._boxes, transport.rank)
        group = Group(Scheduled(watched, {"scan": "chain"}, segment_bytes=8 * 10))
        group.scan(torch.zeros(640, dtype=torch.int64)).wait()

    on_threads(4, work)
    assert sent == 64


def test_parameters_that_require_gradients_can_be_reduced_in_place() -> None:
    def work(transport: ThreadTransport) -> float:
        weight = torch.nn.Parameter(torch.ones(4))
        Group(Scheduled(transport, RING)).all_reduce(weight, Op.MEAN).wait()
        return float(weight.detach().sum())

    assert on_threads(3, work) == [4.0] * 3


def test_a_lost_peer_is_reported_with_the_round() -> None:
    told: list[PeerLost] = []

    def work(transport: ThreadTransport) -> None:
        if transport.rank == 1:
            raise ZeroDivisionError("rank 1 dies")
        try:
            Group(Scheduled(transport, RING)).all_reduce(torch.zeros(4)).wait()
        except PeerLost as lost:
            told.append(lost)

    with pytest.raises(ZeroDivisionError):
        on_threads(3, work)
    assert len(told) == 2
    assert all("all_reduce ring over 3 ranks round" in str(lost) for lost in told)


def spans(group: Group) -> list[str]:
    recorder = Recorder(group.rank, 0)
    Group(Traced(group.executor, recorder)).duplicate().all_reduce(torch.zeros(4)).wait()
    return [f"{span.track} {span.kind}: {span.detail}" for span in recorder.spans]


@pytest.mark.parametrize(
    ("run", "how"),
    [
        (lambda: on_threads(2, lambda t: spans(Group(Scheduled(t, RING)))), "ring"),
        (lambda: on_shm_threads(2, spans), "shared memory"),
        (lambda: on_hosts("aab", spans), "over hosts"),
    ],
)
def test_a_collective_leaves_a_span_and_so_does_waiting_for_it(
    run: Callable[[], list[list[str]]], how: str
) -> None:
    for found in run():
        operation = f"all_reduce {how} 16 bytes"
        assert found == [f"comm reduce: {operation}", f"main wait: {operation}"]


def test_a_collective_that_runs_when_it_is_waited_for_is_exposed() -> None:
    """The span of the operation lies within the wait; nothing of it is hidden."""

    def work(transport: ThreadTransport) -> bool:
        recorder = Recorder(transport.rank, 0)
        group = Group(Traced(Scheduled(transport, RING), recorder))
        pending = group.all_reduce(torch.zeros(4))
        with recorder.span("backward"):
            pass
        pending.wait()
        spans = {span.kind: span for span in recorder.spans}
        wait = spans["wait"]
        ran = spans["reduce"]
        within = wait.start_ns <= ran.start_ns <= ran.end_ns <= wait.end_ns
        found = time_shares(recorder.spans)
        return within and found.exposed > 0 and found.hidden == 0

    assert on_threads(2, work) == [True, True]


# ------------------------------------------------------------------ counted bytes


class Metered(ThreadTransport):
    """Adds up what is really sent."""

    sent = 0

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        self.sent += data.nbytes
        return super().send(data, dst, tag)


CALLS: dict[str, Callable[[Group], Work]] = {
    "all_reduce": lambda g: g.all_reduce(torch.ones(12 * g.size)),
    "all_gather": lambda g: g.all_gather(torch.empty(12 * g.size), torch.ones(12)),
    "reduce_scatter": lambda g: g.reduce_scatter(torch.empty(12), torch.ones(12 * g.size)),
    "all_to_all": lambda g: g.all_to_all(torch.empty(12 * g.size), torch.ones(12 * g.size)),
    "star": lambda g: g.all_reduce(torch.ones(12 * g.size)),
}
RINGS = ("all_reduce", "all_gather", "reduce_scatter")
ALGORITHMS = {**dict.fromkeys(RINGS, "ring"), "all_to_all": "direct"}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CALLS)
def test_the_count_is_what_leaves_a_rank(world: World, name: str, size: int) -> None:
    boxes = Mailboxes(size)

    def body(group: Group) -> tuple[int, int]:
        transport = Metered(boxes, group.rank)
        counted = SentBytes()
        algorithms = {**ALGORITHMS, **({"all_reduce": "star"} if name == "star" else {})}
        CALLS[name](Group(Scheduled(transport, algorithms, link=Link()), sent=counted)).wait()
        return counted.total, transport.sent

    for counted, sent in world(size, body):
        assert counted == sent > 0


def test_what_is_no_part_of_training_is_not_counted(world: World) -> None:
    def body(group: Group) -> int:
        counted = SentBytes()
        with counted.uncounted():
            group.counted(counted).all_reduce(torch.ones(10)).wait()
        return counted.total

    assert world(2, body) == [0, 0]
