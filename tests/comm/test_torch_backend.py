"""Shoal as a backend of torch.distributed, in processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal
from shoal.errors import PeerLost
from shoal.transport.shm.segment import is_built
from tests import forked
from tests.comm.torch_ranks import forked_ranks

pytestmark = pytest.mark.skipif(not is_built(), reason="built without a compiler")
ROOT = Path(__file__).parents[2]
TORCH_TESTS = [
    "test_DistributedDataParallelCPU",
    "test_all_gather",
    "test_all_gather_coalesced_simple",
    "test_all_reduce_coalesced_max",
    "test_all_reduce_product",
    "test_all_reduce_sum_async",
    "test_barrier_timeout_full_group",
    "test_broadcast_full_group",
    "test_gather",
    "test_gather_checks",
    "test_isend",
    "test_monitored_barrier_gloo",
    "test_reduce_sum",
    "test_scatter",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
]


def on_backend(
    folder: Path,
    body: Callable[[int], Any],
    size: int = 2,
    ends_well: bool = True,
    hosts: str = "aaaa",
    gone: int | None = None,
) -> list[Any]:
    """Run `body(rank)` in processes whose default group is "shoal"; what it gives, by rank.

    `hosts` tells for each rank where it is said to be; rank `gone` gives no answer.
    """
    all_answer = torch.multiprocessing.get_context("fork").Barrier(size - (gone is not None))

    def main(rank: int) -> Any:
        os.environ["SHOAL_HOST_ID"] = hosts[rank]
        shoal.register_backend()
        dist.init_process_group(
            "shoal", init_method=f"file://{folder}/store", rank=rank, world_size=size,
            timeout=timedelta(seconds=30),
        )  # fmt: skip
        found = body(rank)
        if ends_well:
            dist.barrier()
        else:
            all_answer.wait(60)
        dist.destroy_process_group()
        return found

    found = forked_ranks(main, size)
    return [answer for rank, answer in enumerate(found) if rank != gone]


def trained(wrap: Callable[[nn.Module], nn.Module], rank: int) -> list[float]:
    """Three steps on this rank's half of the batch; the weights of the first layer."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        part = data if rank < 0 else data[rank * 4 : rank * 4 + 4]
        model(part).square().mean().backward()
        optimizer.step()
    weight = next(iter(model.parameters())).detach()
    return weight.flatten().tolist()  # type: ignore[no-any-return]


def test_distributed_data_parallel_gives_the_weights_of_one_process(tmp_path: Path) -> None:
    import torch._dynamo  # noqa: F401  # once, not in every rank

    found = on_backend(tmp_path, partial(trained, nn.parallel.DistributedDataParallel))
    alone = trained(lambda model: model, -1)
    for weights in found:
        assert weights == pytest.approx(alone, abs=1e-6)


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("everyone", [False, True])
def test_a_monitored_barrier_names_who_did_not_come(tmp_path: Path, everyone: bool) -> None:
    def body(rank: int) -> str:
        dist.monitored_barrier(timeout=timedelta(seconds=20))
        pair = dist.new_group([0, 1])
        if rank < 2:
            dist.monitored_barrier(pair)
        dist.barrier()
        if rank:
            return ""
        short = timedelta(seconds=0.2)
        return _error_of(lambda: dist.monitored_barrier(timeout=short, wait_all_ranks=everyone))

    who = "Ranks 1, 2" if everyone else "Rank 1"
    told = on_backend(tmp_path, body, size=3)[0]
    assert f"{who} failed to pass monitoredBarrier in 200 ms" in told


def test_monitored_barriers_of_other_backends_are_torchs_own(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        pair = dist.new_group([0, 1], backend="gloo")
        dist.monitored_barrier(pair, timeout=timedelta(seconds=20))
        dist.barrier()
        if rank:
            return ""
        return _error_of(lambda: dist.monitored_barrier(pair, timedelta(seconds=0.2)))

    assert "Rank 1 failed to pass monitoredBarrier in 200 ms" in on_backend(tmp_path, body)[0]


SHORT = timedelta(seconds=0.2)


def _given_a_timeout(kind: str, rank: int) -> Callable[[], Any]:
    """What rank 0 calls in vain; both ranks make what it needs."""
    world: Any = dist.group.WORLD
    if kind == "group":
        return partial(dist.barrier, dist.new_group([0, 1], timeout=SHORT))
    if kind == "world":
        world.set_timeout(SHORT)
    if kind == "options":
        options = dist.AllreduceOptions()
        options.timeout = SHORT
        return lambda: world.allreduce([torch.zeros(3)], options).wait()
    if rank == 0 and kind in ("wait", "receive"):
        begin = (
            partial(dist.all_reduce, async_op=True)
            if kind == "wait"
            else partial(dist.irecv, src=1)
        )
        return partial(begin(torch.zeros(3)).wait, SHORT)  # type: ignore[operator]
    return dist.barrier


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("group", "rank 0 lost rank 1 after 0.2 s in barrier #1 (no answer before"),
        ("world", "rank 0 lost rank 1 after 0.2 s in barrier #"),
        ("options", "rank 0 lost rank 1 after 0.2 s in all_reduce #"),
        ("wait", "Timed out waiting 200ms"),
        ("receive", "rank 0 lost rank 1 after 0.2 s in recv from 1, tag 0"),
    ],
)
def test_timeouts(tmp_path: Path, kind: str, sentence: str) -> None:
    """Rank 1 does not call it; its answer comes before rank 0 has waited in vain."""

    def body(rank: int) -> str:
        dist.barrier()
        call = _given_a_timeout(kind, rank)
        return "" if rank else _error_of(call)

    assert sentence in on_backend(tmp_path, body, ends_well=False)[0]


def test_ranks_of_several_hosts(tmp_path: Path) -> None:
    """Ranks 0 and 1 share memory; rank 2 is elsewhere."""

    def body(rank: int) -> list[Any]:
        things: list[Any] = [None] * 3
        dist.all_gather_object(things, rank * 10)
        work = dist.all_reduce(torch.full((100_000,), float(rank + 1)), async_op=True)
        doubled = work.get_future().then(lambda f: float(f.value()[0][0]) * 2).wait()
        into = torch.zeros(1)
        nearby = torch.zeros(1)
        dist.send(torch.tensor([rank + 5.0]), (rank + 1) % 3, tag=9)
        dist.recv(into, (rank - 1) % 3, tag=9)
        pair = dist.new_group([1, 2])
        if rank:
            dist.broadcast(nearby.fill_(rank), 2, group=pair)
        dist.monitored_barrier(timeout=timedelta(seconds=20))
        if rank:
            dist.send(nearby, 0, tag=11)
        senders = [] if rank else sorted(dist.recv(nearby, tag=11) for _ in range(2))
        kind = type(dist.group.WORLD.executor).__name__  # type: ignore[union-attr]
        return [things, doubled, float(into), float(nearby), senders, kind]

    found = on_backend(tmp_path, body, size=3, hosts="aab")
    for rank, (got, senders) in enumerate([(7.0, [1, 2]), (5.0, []), (6.0, [])]):
        assert found[rank] == [[0, 10, 20], 12.0, got, 2.0, senders, "Hierarchical"]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_is_killed_ends_the_work_on_every_host(tmp_path: Path, victim: int) -> None:
    def body(rank: int) -> str:
        data = torch.ones(10_000)
        try:
            for step in range(10_000):
                if rank == victim and step == 20:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(data)
        except PeerLost as error:
            return str(error)
        return "nothing was raised"

    found = on_backend(tmp_path, body, size=4, ends_well=False, hosts="aabb", gone=victim)
    for sentence in found:
        assert " lost " in sentence and "all_reduce #21 over 2 hosts" in sentence, sentence
    assert any("killed by signal 9 (SIGKILL)" in sentence for sentence in found)


USE = """
dist.init_process_group("shoal", init_method="file://" + sys.argv[1], rank=0, world_size=1)
data = torch.ones(3)
dist.all_reduce(data)
assert dist.get_backend() == "shoal" and data.tolist() == [1.0, 1.0, 1.0]
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("program", "autoload"),
    [
        ("import sys, shoal; assert 'torch' not in sys.modules", "1"),
        ("import sys, torch, torch.distributed as dist, shoal" + USE, "0"),
        pytest.param(
            "import sys, shoal, torch, torch.distributed as dist" + USE,
            "1",
            marks=pytest.mark.whole,
        ),
        pytest.param(
            "import sys, torch, torch.distributed as dist" + USE, "1", marks=pytest.mark.whole
        ),  # without --whole: test_torch_entry_point.py
        pytest.param(
            "import sys, shoal; shoal.Job; import torch, torch.distributed as dist" + USE,
            "0",
            marks=pytest.mark.whole,
        ),
    ],
    ids=["alone it loads no torch", "after torch", "before torch", "never", "torch by shoal"],
)
def test_importing_shoal_registers_it(tmp_path: Path, program: str, autoload: str) -> None:
    """Before torch, or without being imported at all, it takes an installed Shoal."""
    if autoload == "1" and not entry_points(group="torch.backends", name="shoal"):
        pytest.skip("Shoal is not installed here")
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "store")],
        check=True,
        cwd=ROOT,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
    )


@pytest.mark.timeout(600)
@pytest.mark.whole
@pytest.mark.parametrize("backend", ["gloo", "shoal"])
def test_part_of_pytorchs_own_suite(backend: str) -> None:
    """As Gloo, so that its tests are not skipped; and one that looks at the backend's name."""
    pytest.importorskip("expecttest")
    names = [] if os.environ.get("SHOAL_TEST_WHOLE_SUITE") else TORCH_TESTS
    done = forked.run(
        [sys.executable, "-m", "tests.comm.torch_suite"]
        + (names if backend == "gloo" else ["test_ddp_logging_data_cpu"]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "BACKEND": backend},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "skipped" not in done.stderr or not names
