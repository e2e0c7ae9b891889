"""Worlds of threads, and a guard against what tests leave behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from benchmarks.thread_transport import Mailboxes, ThreadTransport
from shoal.comm.executors.scheduled import Scheduled
from shoal.comm.group import Group
from shoal.errors import PeerLost
from shoal.schedules.collectives.cost import Link
from tests.cores import one_core
from tests.devices import NUM_GPUS, show_gpus
from tests.forked import zygotes
from tests.products import WHOLE_SUITE, covering
from tests.seeds import begin_rank, manual_seed

# a shell that starts the tests in the background ignores Ctrl-C, and nohup ignores the end of the
# terminal; so would all that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# how long an example takes is no fact about the code
settings.register_profile(
    "shoal", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("shoal-whole", settings.get_profile("shoal"), max_examples=300)
settings.load_profile("shoal")

# what a fork of the zygote starts is a fork of it already; SHOAL_START_METHOD=fork tests templates
os.environ.setdefault("SHOAL_START_METHOD", "spawn")
# torch's compiler reads it when it is loaded; what is set in its config holds for one thread only
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pools of its own, which are left behind
os.environ.pop("COLUMNS", None)  # of a test process: tables are those of no terminal


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole",
        action="store_true",
        help="run all combinations of parameters, all ranks of proofs, more random examples",
    )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # several processes share the cores
    if config.getoption("--whole"):
        os.environ[WHOLE_SUITE] = "1"  # for the processes of xdist, too
        settings.load_profile("shoal-whole")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --whole: leave out what is marked `whole`, and all but a cover of products."""
    for item in items:
        if item.get_closest_marker("gpu") and not NUM_GPUS:
            item.add_marker(pytest.mark.skip("needs a CUDA GPU"))
    if config.getoption("--whole"):
        return
    products: dict[str, list[pytest.Function]] = {}
    left_out: set[pytest.Item] = {item for item in items if item.get_closest_marker("whole")}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("product"):
            products.setdefault(item.nodeid.split("[")[0], []).append(item)
    for combined in products.values():
        marker = combined[0].get_closest_marker("product")
        assert marker is not None
        values = [{k: repr(v) for k, v in item.callspec.params.items()} for item in combined]
        kept = covering(values, marker.kwargs.get("pairs", False))[: marker.kwargs.get("most")]
        left_out |= set(combined) - {combined[position] for position in kept}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """What is loaded now stays: no collection of garbage looks through it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before fixtures of any scope
def pytest_runtest_setup(item: pytest.Item) -> None:
    show_gpus(item.get_closest_marker("gpu") is not None)


@pytest.fixture(scope="session")
def whole_suite(request: pytest.FixtureRequest) -> bool:
    """Whether --whole was given: then proofs and prices take all numbers of ranks."""
    return bool(request.config.getoption("--whole"))


World = Callable[[int, Callable[[Group], Any]], list[Any]]


@pytest.fixture(autouse=True)
def _no_seeds_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "manual_seed", manual_seed)


def run_world(size: int, body: Callable[[Group], Any]) -> list[Any]:
    """Run `body(group)` on `size` ranks as threads; results by rank, or the first real error."""
    boxes = Mailboxes(size)

    def rank_body(rank: int) -> Any:
        begin_rank(size)
        try:
            return body(Group(Scheduled(ThreadTransport(boxes, rank), link=Link())))
        except BaseException:
            boxes.break_all(rank)
            raise

    with one_core(), _pool(size) as pool:
        futures = [pool.submit(rank_body, rank) for rank in range(size)]
        errors = [e for e in (future.exception() for future in futures) if e is not None]
    errors.sort(key=lambda error: isinstance(error, PeerLost))
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


@contextmanager
def _pool(size: int) -> Iterator[ThreadPoolExecutor]:
    """Ranks that hang are left behind when the time of a test is over."""
    pool = ThreadPoolExecutor(size)
    has_ended = False
    try:
        yield pool
        has_ended = True
    finally:
        pool.shutdown(wait=has_ended, cancel_futures=True)


@pytest.fixture
def world() -> World:
    return run_world


def _children() -> set[int]:
    """The processes that this one has started and that have not been waited for."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            found |= {int(pid) for pid in file.read_text().split()}
    return found


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.glob("*shoal*")} if folder.is_dir() else set()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A test that leaves a thread, a child process or shared memory behind fails."""
    threads = set(threading.enumerate())
    children = _children()
    memory = _shared_memory()
    yield
    left = [t for t in threading.enumerate() if t not in threads]
    deadline_s = time.monotonic() + 30.0
    for thread in left:  # one that has done its work may still be on its way out
        thread.join(max(0.0, deadline_s - time.monotonic()))
    left_threads = [
        t.name for t in left if t.is_alive() and not t.name.startswith(("pytest", "Dummy"))
    ]
    assert not left_threads, f"threads left behind: {left_threads}"
    assert not _children() - children - zygotes(), "child processes left behind"
    assert not _shared_memory() - memory, "shared memory left behind"
