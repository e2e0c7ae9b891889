"""`shoal.run`: become a worker if a launcher has started this process, else run or launch.

python train.py                      one worker, here
shoal run train.py -n 4 -s ddp       this process is one of four: SHOAL_* says which
torchrun, mpirun, srun               the same, by their variables
shoal.run(train, workers=4)          start the script again as four workers, and wait
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from shoal.comm.elastic import ElasticSum
from shoal.comm.executor import Executor
from shoal.comm.executors.deferred import Deferred
from shoal.comm.executors.scheduled.executor import Scheduled
from shoal.comm.executors.solo import solo_group
from shoal.comm.executors.torch import Torch, join_world
from shoal.comm.group import Group
from shoal.comm.select import share_memory
from shoal.comm.tracing import Traced
from shoal.errors import BadInput, PeerLost, StrategyError
from shoal.launch.environment import Placement, detect
from shoal.launch.failures import report_failure, report_finished
from shoal.launch.fork import fork
from shoal.launch.local import launch
from shoal.launch.lost_workers import note_meeting, tolerance_of
from shoal.launch.rendezvous import open_rendezvous
from shoal.launch.run_dir import leave_report
from shoal.launch.worker import die_with_launcher, open_progress
from shoal.observe.capture import Capture, StopTraining
from shoal.observe.memory_estimate import estimate_from_environment
from shoal.observe.memory_probe import Probe
from shoal.observe.progress import for_worker
from shoal.observe.trace import OFF, Recorder, Tracer
from shoal.runtime.faults import faults_of
from shoal.runtime.gone import is_gone
from shoal.strategy.base import Term
from shoal.strategy.strategy import Strategy, as_strategy
from shoal.train.job import Job, RunServices
from shoal.transport.torch_p2p import TorchTransport

_LOOK_S = 0.5
Train = Callable[[Job], Any]
_calls = 0
_instead: Callable[[Train], Any] | None = None


def run(
    train: Train,
    *,
    strategy: str | Strategy | Term | None = None,
    workers: int | None = None,
    seed: int | None = None,
    device: str | None = None,
) -> Any:
    """Run `train(job)` under a strategy.

    Alone it runs here and returns what `train` returns. With `workers` above 1 the script is
    started again as that many processes, and None is returned when they are done. A launcher's
    word (`shoal run -n 4 -s ddp --seed 1`, `SHOAL_STRATEGY`, …) wins over the arguments here.
    """
    global _calls
    if _instead is not None:
        return _instead(train)
    _calls += 1
    environ = os.environ
    wanted = environ.get("SHOAL_CALL")
    if wanted is not None and int(wanted) != _calls:
        return None  # this process was started for another call of shoal.run in the script
    placement = detect(environ)
    size = placement.size if placement else workers or 1
    chosen = environ.get("SHOAL_STRATEGY") or strategy or ("ddp" if size > 1 else "single")
    if placement is None and size > 1:
        return _launch_self(train, as_strategy(chosen), size, seed, device)

    def work() -> Any:
        value = as_strategy(chosen)
        number = int(environ.get("SHOAL_SEED") or seed or 0)
        worker = Worker(value, placement, number, environ.get("SHOAL_DEVICE") or device)
        return worker.run(train)

    if placement is None or placement.launcher != "shoal":
        return work()
    result = _report_failures(work, placement)
    if wanted is not None:
        sys.exit(0)  # what follows in the script belongs to the process that launched this one
    return result


@contextmanager
def taken_by(instead: Callable[[Train], Any]) -> Iterator[None]:
    """While the block runs, `shoal.run(train)` is a call of `instead(train)`."""
    global _instead
    _instead = instead
    try:
        yield
    finally:
        _instead = None


class Worker:
    """One process's part: device, group, job, and everything taken down again at the end."""

    def __init__(
        self, strategy: Strategy, placement: Placement | None, seed: int, device: str | None
    ):
        self.strategy = strategy
        self.placement = placement
        self.seed = seed
        self.size = placement.size if placement else 1
        self.rank = placement.rank if placement else 0
        strategy.require_built()
        strategy.layout(self.size)
        self.number = _calls  # tells runs of one process apart
        self.device = choose_device(device, placement)
        _check_place(strategy, placement, self.device)

    def run(self, train: Callable[[Job], Any]) -> Any:
        die_with_launcher()
        torch.manual_seed(self.seed)
        with ExitStack() as stack:
            group = stack.enter_context(self._group())
            tracer = self._tracer(group)
            progress = for_worker(self.rank, self.size, open_progress(os.environ))
            stack.callback(progress.close)
            if tracer.enabled:
                group = Group(Traced(group.executor, tracer))

            def make(kind: type[Job]) -> Job:
                return kind(
                    self.strategy,
                    group,
                    device=self.device,
                    seed=self.seed,
                    services=RunServices(
                        progress=progress,
                        tracer=tracer,
                        faults=faults_of(os.environ, self.rank, self.size),
                        elastic_sum=self._tally(),
                    ),
                )

            try:
                if estimate_from_environment(os.environ, train, make):
                    self.note_end()
                    return None
                job = make(Job)
                self.prepare(job)
                return self._train(train, job)
            except SystemExit as end:
                if not end.code:
                    self.note_end()
                raise
            except Exception as error:
                self.give_up(error)
                raise
            finally:
                if isinstance(tracer, Recorder):
                    tracer.write(Path(os.environ["SHOAL_TRACE_DIR"]))

    def _train(self, train: Callable[[Job], Any], job: Job) -> Any:
        capture = Capture.from_environment(os.environ, job)
        probe = Probe.from_environment(os.environ, job)
        result = None
        with suppress(StopTraining):
            result = train(job)
        if capture is not None:
            capture.write()
        if probe is not None:
            probe.write()
        job.close()
        self.leave(job)
        self.note_end()
        return result

    def prepare(self, job: Job) -> None:
        """Before training."""

    def leave(self, job: Job) -> None:
        """After training: a report for the launcher."""
        if self._is_ours:
            leave_report(os.environ["SHOAL_RUN_DIR"], self.rank, job.report())

    @property
    def _is_ours(self) -> bool:
        """Whether our own launcher looks after this process."""
        return self.placement is not None and self.placement.launcher == "shoal"

    def _tally(self) -> ElasticSum | None:
        """Our launcher tells who is gone; under others a lost worker ends the run anyway."""
        if not self._is_ours or not self.strategy.survives_loss:
            return None
        run_dir = Path(os.environ["SHOAL_RUN_DIR"])
        folder = run_dir / f"tally-{self.number}"
        return ElasticSum(folder, self.rank, partial(is_gone, run_dir), patience_s=math.inf)

    def note_end(self) -> None:
        if self._is_ours:
            report_finished(os.environ["SHOAL_RUN_DIR"], self.rank)

    def give_up(self, error: Exception) -> None:
        """Under our launcher: leave a report and go at once.

        Taking down the group may wait for a peer that waits for this one; the launcher ends
        the others and tells the first failure of all.
        """
        if self._is_ours:
            _say_where(error)
            report_failure(os.environ["SHOAL_RUN_DIR"], self.rank, error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2 if isinstance(error, BadInput) else 1)

    @contextmanager
    def _group(self) -> Iterator[Group]:
        needs_group = self.strategy.sync_for(self.size).needs_group
        if self.placement is None or not needs_group:
            yield solo_group()
        elif self._is_ours and self.strategy.starts_apart:
            run_dir = Path(os.environ["SHOAL_RUN_DIR"])
            folder = run_dir / f"start-{self.number}"
            gone = partial(is_gone, run_dir)
            with ExitStack() as stack:
                later = self._whole_group()

                def make() -> Executor:
                    return stack.enter_context(later).executor

                yield Group(Deferred(folder, self.rank, self.size, gone, make))
        else:
            with self._whole_group() as group:
                if self._is_ours:
                    note_meeting(os.environ["SHOAL_RUN_DIR"])
                yield group

    @contextmanager
    def _whole_group(self) -> Iterator[Group]:
        """All ranks have come when it is there."""
        assert self.placement is not None
        ours = not dist.is_initialized()
        with open_rendezvous(self.placement) as rendezvous, self._nobody_absent() as met:
            backend = choose_backend(self.device, self.placement)
            world = join_world(rendezvous, self.rank, self.size, backend, f"run {self.number}")
            executor: Executor | None = None
            if self._shares_memory():
                own = PrefixStore(f"memory of run {self.number}", world.get_group_store())
                executor = share_memory(own, self.rank, self.size)
            met()
            group = Group(executor or self._over(world))
            try:
                yield group
            finally:
                group.close()
                if ours:
                    dist.destroy_process_group()

    @contextmanager
    def _nobody_absent(self) -> Iterator[Callable[[], None]]:
        """Until `met` is called: give up when a worker has ended, since it will never come."""
        met = threading.Event()
        if not self._is_ours:
            yield met.set
            return
        run_dir = Path(os.environ["SHOAL_RUN_DIR"])

        def look() -> None:
            while not met.wait(_LOOK_S):
                gone = [r for r in range(self.size) if is_gone(run_dir, r)]
                if gone and not met.wait(_LOOK_S):  # or it was here, and went on to its end
                    self.give_up(PeerLost(self.rank, gone[0], "the meeting of all workers"))

        watcher = threading.Thread(target=look, name="shoal-meeting", daemon=True)
        watcher.start()

        def end() -> None:
            met.set()
            watcher.join()

        try:
            yield end
        finally:
            end()

    def _over(self, world: dist.ProcessGroup) -> Executor:
        """A named algorithm runs as a schedule over point-to-point messages; "auto" is torch's."""
        term = self.strategy.sync_for(self.size)
        algorithm = term.collective_algorithm
        if algorithm is None:
            return Torch(world)
        if self.device.type != "cpu":
            raise BadInput(f"{term} runs on CPUs: on GPUs leave the algorithm to NCCL")
        return Scheduled(TorchTransport(world), {"all_reduce": algorithm}, background=True)

    def _shares_memory(self) -> bool:
        """Ranks of a host go through its memory, unless NCCL or a named algorithm serves them."""
        assert self.placement is not None
        algorithm = self.strategy.sync_for(self.size).collective_algorithm
        return choose_backend(self.device, self.placement) == "gloo" and algorithm is None

    def _tracer(self, group: Group) -> Tracer:
        if not os.environ.get("SHOAL_TRACE_DIR"):
            return OFF
        origin = torch.tensor([time.monotonic_ns()], device=self.device)
        if self.placement and self.placement.local_size == self.size:
            group.broadcast(origin).wait()
        else:  # other hosts have other clocks: call the end of the barrier zero everywhere
            group.barrier().wait()
            origin.fill_(time.monotonic_ns())
        return Recorder(self.rank, int(origin))


def choose_device(device: str | None, placement: Placement | None) -> torch.device:
    """The device of this rank: its own GPU, a shared one if there are too few, or the CPU."""
    local_rank = placement.local_rank if placement else 0
    count = torch.cuda.device_count()
    name = device or ("cuda" if count else "cpu")
    try:
        chosen = torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"there is no device {name!r}: take cpu, cuda or cuda:N") from error
    if chosen.type == "cuda":
        if not count:
            raise BadInput(f"device {name!r} was asked for, and PyTorch sees no CUDA GPU here")
        if chosen.index is None:
            chosen = torch.device("cuda", local_rank % count)
        if chosen.index is not None and chosen.index >= count:
            raise BadInput(f"device {name!r} was asked for, and there are {count} GPUs")
        torch.cuda.set_device(chosen)
    return chosen


def _check_place(strategy: Strategy, placement: Placement | None, device: torch.device) -> None:
    """Refuse, before anything starts, what needs the memory of one host and does not get it."""
    if placement is None or placement.size == 1:
        return
    term = strategy.sync_for(placement.size)
    if not term.needs_one_host:
        return
    if placement.local_size < placement.size:
        raise StrategyError(
            f"{term.name} keeps the weights in the memory of one host, and these {placement.size} "
            'workers are on several: take ps(mode="async") or gossip(mode="async")'
        )
    if device.type != "cpu":
        raise StrategyError(
            f"{term.name} keeps the weights in memory that processes share, and {device} is not "
            "the CPU: run it with --device cpu"
        )


def choose_backend(device: torch.device, placement: Placement) -> str:
    """NCCL wants a GPU for each rank; Gloo serves CPUs, and ranks that share a GPU."""
    own_gpu = placement.local_size <= torch.cuda.device_count()
    if device.type == "cuda" and own_gpu and dist.is_nccl_available():
        return "nccl"
    return "gloo"


def _say_where(error: Exception) -> None:
    """Add the line of the script to a mistake that is told in one sentence."""
    ours = str(Path(__file__).parents[1])
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in f.filename
        and not f.filename.startswith((ours, sys.base_prefix, "<"))
    ]
    if isinstance(error, BadInput) and frames:
        error.args = (f"{error} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})",)


def _report_failures(work: Callable[[], Any], placement: Placement) -> Any:
    """Leave a report for the launcher, which tells the first failure of all, and exit."""
    try:
        return work()
    except Exception as error:
        report_failure(os.environ["SHOAL_RUN_DIR"], placement.rank, error)
        sys.exit(2 if isinstance(error, BadInput) else 1)


def _launch_self(
    train: Callable[[Job], Any],
    strategy: Strategy,
    workers: int,
    seed: int | None,
    device: str | None,
) -> None:
    strategy.require_built()
    strategy.layout(workers)
    env = {"SHOAL_STRATEGY": str(strategy), "SHOAL_CALL": str(_calls)}
    if seed is not None:
        env["SHOAL_SEED"] = str(seed)
    if device is not None:
        env["SHOAL_DEVICE"] = device
    servers = strategy.servers(workers)
    tolerance = tolerance_of(strategy, workers)
    command = _own_command()
    if command is not None:
        launch(command, workers, env={**os.environ, **env}, servers=servers, tolerance=tolerance)
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise BadInput(
            "workers of an interactive session are forks of it, and it has used CUDA already: "
            "restart it, or put the training function into a file"
        )

    def body() -> None:
        torch.set_num_threads(1)
        placement = detect(os.environ)
        value = choose_device(device, placement)
        Worker(strategy, placement, seed or 0, str(value)).run(train)

    fork(body, workers, env, servers=servers, tolerance=tolerance)


def _own_command() -> list[str] | None:
    """How to start this script again; None in an interactive session."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        return None
    return [sys.executable, str(file), *sys.argv[1:]]
