"""Shoal as a backend of torch.distributed, in processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import shoal
from shoal.comm.transport.shm.segment import is_built
from shoal.errors import PeerLost
from tests import forked
from tests.comm.test_frameworks import data, model, numbers, sgd, train, trained_alone
from tests.comm.torch_ranks import forked_ranks

pytestmark = pytest.mark.skipif(not is_built(), reason="built without a compiler")
ROOT = Path(__file__).parents[2]


def on_backend(
    folder: Path,
    body: Callable[[int], Any],
    size: int = 2,
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
        all_answer.wait(60)
        dist.destroy_process_group()
        return found

    found = forked_ranks(main, size)
    return [answer for rank, answer in enumerate(found) if rank != gone]


def test_distributed_data_parallel_gives_the_weights_of_one_process(tmp_path: Path) -> None:
    import torch._dynamo  # once, not in every rank

    def body(rank: int) -> list[float]:
        net = nn.parallel.DistributedDataParallel(model())
        half = DataLoader(data(), batch_size=4, sampler=range(4 * rank, 4 * rank + 4))
        train(net, sgd(net), half, torch.Tensor.backward)
        return numbers(net)

    for weights in on_backend(tmp_path, body):
        assert weights == pytest.approx(trained_alone(), abs=1e-6)


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("backend", "everyone", "who"),
    [("shoal", False, "Rank 1"), ("shoal", True, "Ranks 1, 2"), ("gloo", False, "Rank 1")],
)
def test_a_monitored_barrier_names_who_did_not_come(
    tmp_path: Path, backend: str, everyone: bool, who: str
) -> None:
    """Groups of other backends keep torch's own."""

    def body(rank: int) -> str:
        pair = dist.new_group([0, 1], backend=backend)
        if rank < 2:
            dist.monitored_barrier(pair)
        dist.monitored_barrier(timeout=timedelta(seconds=20))
        group = None if backend == "shoal" else pair
        return "" if rank else _error_of(lambda: dist.monitored_barrier(group, SHORT, everyone))

    told = on_backend(tmp_path, body, size=3)[0]
    assert f"{who} failed to pass monitoredBarrier in 200 ms" in told


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

    assert sentence in on_backend(tmp_path, body)[0]


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

    found = on_backend(tmp_path, body, size=4, hosts="aabb", gone=victim)
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
            "import sys, shoal; shoal.Job; import torch, torch.distributed as dist" + USE,
            "0",
            marks=pytest.mark.whole,
        ),
    ],
    ids=["alone it loads no torch", "after torch", "torch by shoal"],
)
def test_importing_shoal_registers_it(tmp_path: Path, program: str, autoload: str) -> None:
    """Before torch, or without being imported at all: test_torch_entry_point.py."""
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "store")],
        check=True,
        cwd=ROOT,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
    )


@pytest.mark.timeout(600)
@pytest.mark.whole
@pytest.mark.parametrize(
    ("words", "backend"),
    [
        (["torch_suite"], "gloo"),  # as Gloo, so that its tests are not skipped
        (["torch_suite", "test_ddp_logging_data_cpu"], "shoal"),  # looks at the backend's name
        (["torch_features", "2"], "shoal"),
        (["torch_features", "4"], "shoal"),
    ],
)
def test_pytorchs_own_suite_and_every_feature_as_on_gloo(words: list[str], backend: str) -> None:
    pytest.importorskip("expecttest")
    done = forked.run(
        [sys.executable, "-m", f"tests.comm.{words[0]}", *words[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "BACKEND": backend},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
