"""`shoal.run`: become a worker if a launcher has started this process, else run or launch.

python train.py                      one worker, in this process
shoal run -n 4 -s ddp train.py       this process is one of four: RunConfig has its rank
torchrun, mpirun, srun               the same, from their variables
dist.init_process_group(...)         one of its ranks, where no variable says more
shoal.run(train, workers=4)          start the script again as four workers, and wait; in a thread,
                                     a child process or a notebook they are forks of this one
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.errors import BadInput
from shoal.launch.losses.failures import end_with_sentence, report_failure
from shoal.runtime.config import RunConfig
from shoal.runtime.files import scratch_folder
from shoal.runtime.launched_worker import allow_training
from shoal.runtime.wording import say
from shoal.strategy.base import Term
from shoal.strategy.strategy import Strategy, as_strategy
from shoal.train.callbacks import Callback
from shoal.worker.environment import Placement, detect
from shoal.worker.returned import (
    PastCalls,
    arguments_of,
    bound,
    bound_as_launched,
    handed_back,
    outcome_of,
)
from shoal.worker.worker import Train, Worker

_numbers = itertools.count(1)  # of calls; threads may call at once
_past = PastCalls()
_alone = threading.RLock()  # runs in this process draw from the same generators
_replacement: Callable[[Train], Any] | None = None


def run(
    train: Callable[..., Any],
    *args: Any,
    strategy: str | Strategy | Term | None = None,
    workers: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> Any:
    """Run `train(job, *args)` under a strategy, and return what it returns.

    With one worker it runs in this process. With `workers` above 1 the script is started again as
    that many processes; what the first of them returns comes back, and has to be data: numbers,
    text, tensors, lists, tuples, dicts. Options of a launcher (`shoal run -n 4 -s ddp --seed 1`,
    `SHOAL_STRATEGY`, …) override the arguments here. `strategy="auto"` measures this machine once,
    plans for the model, says what it chose and why, and runs that. The methods of `callbacks` are
    called after steps, evaluations, checkpoints and losses of workers, on the first worker.
    """
    if _replacement is not None:
        return _replacement(bound(train, args))
    end_with_sentence()
    allow_training()
    number = next(_numbers)
    if number > 1:
        gc.collect()  # the model of the run before may be in cycles, which are few and large
    config = RunConfig.from_environment()
    _refuse_child_of_worker(config)
    if config.call is not None and config.call != number:  # of another call, in the same script
        return None if config.returned is None else outcome_of(config.returned, number)
    placement = detect(config) or _in_process_group(config)
    size = placement.size if placement else workers or 1
    chosen = config.strategy or strategy or ("ddp" if size > 1 else "single")
    config = replace(
        config, seed=seed if config.seed is None else config.seed, device=config.device or device
    )
    call = RunCall(train, args, number, callbacks)
    if chosen == "auto":
        chosen = _choose(call, size, placement, config)
    plan = as_strategy(chosen)
    if placement is not None:
        return call.work(plan, placement, config)
    try:
        if size > 1:
            value = call.launch(plan, size, config)
        else:
            with _alone:
                value = call.train_here(bound(train, args), plan, None, config)
    except Exception as error:
        _past.note_error(number, error)
        raise
    _past.note_value(number, value)
    return value


@contextmanager
def replaced_run(replacement: Callable[[Train], Any] | None) -> Iterator[None]:
    """While the block runs, `shoal.run(train)` calls `replacement(train)`; None: as it is."""
    global _replacement
    _replacement = replacement
    try:
        yield
    finally:
        _replacement = None


def _in_process_group(config: RunConfig) -> Placement | None:
    """The ranks of the process group that the script has made already; None without one."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    ranks = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    master = {"MASTER_ADDR": "unknown", "MASTER_PORT": "1"}  # it has been used already
    return detect(replace(config, environ={**master, **config.environ, **ranks}))


def _refuse_child_of_worker(config: RunConfig) -> None:
    """It has the worker's environment, and would take its place."""
    if config.is_launched and _is_child():
        raise BadInput(
            f"a child process of worker {config.rank} calls shoal.run, and would take its place "
            "among the workers: start the script with python, and say shoal.run(…, workers=n)"
        )


def _is_child() -> bool:
    """Whether a pool of processes, or the like, has started this one."""
    return multiprocessing.parent_process() is not None


def _choose(
    call: RunCall, workers: int, placement: Placement | None, config: RunConfig
) -> Strategy:
    """What `strategy="auto"` stands for."""
    if placement is None:
        from shoal.worker.auto import choose_strategy

        def trace_self(workers: int, config: RunConfig) -> None:
            """Run the script once in processes of its own, without its output."""
            strategy = as_strategy(config.strategy or "single")
            call.launch(strategy, workers, config, is_shown=False)

        return choose_strategy(workers, config, trace_self, say)
    if placement.rank == 0:
        say("auto: ddp, for workers of another launcher have to start with a strategy")
    return as_strategy("ddp" if workers > 1 else "single")


@dataclass(frozen=True)
class RunCall:
    """One call of shoal.run."""

    train: Callable[..., Any]
    args: Sequence[Any]
    number: int
    callbacks: Sequence[Callback]

    def train_here(
        self, train: Train, strategy: Strategy, placement: Placement | None, config: RunConfig
    ) -> Any:
        """As the only worker, or one of several."""
        worker = Worker(strategy, placement, config, self.number)
        worker.callbacks = self.callbacks
        return worker.run(train)

    def work(self, strategy: Strategy, placement: Placement, config: RunConfig) -> Any:
        """Be a worker that a launcher has started."""
        folder = config.run_dir or config.host_dir
        is_ours = config.is_launched or config.host_dir
        try:
            train = bound(self.train, self.args)
            if config.returned is not None:
                train = bound_as_launched(self.train, self.args, config.returned)
            result = self.train_here(train, strategy, placement, config)
        except Exception as error:
            if not is_ours:
                raise
            if folder is not None:  # where the launcher reads why it failed
                report_failure(folder, placement.rank, error)
            sys.exit(2 if isinstance(error, BadInput) else 1)
        if is_ours and config.call is not None:
            sys.exit(0)  # the rest of the script belongs to the process that launched this one
        return result

    def launch(
        self, strategy: Strategy, workers: int, config: RunConfig, is_shown: bool = True
    ) -> Any:
        """Start the workers, and return what the first of them returns."""
        from shoal.launch.here.local import LaunchSpec, launch
        from shoal.launch.here.output import discard_lines, print_lines
        from shoal.launch.here.process_config import replication_of
        from shoal.launch.losses.lost_workers import taking_back, tolerance_of

        strategy.require_built()
        strategy.layout(workers)
        if config.takes_back:
            strategy = taking_back(strategy, workers)
        with scratch_folder("call") as folder:
            config = replace(config, strategy=str(strategy), call=self.number, returned=folder)
            spec = LaunchSpec(
                (),
                workers,
                config,
                strategy.servers(workers),
                tolerance=tolerance_of(
                    strategy, workers, config.restarts, config.start, config.min_workers
                ),
                replication=replication_of(strategy, workers, config.restarts),
            )
            command = _command_of_script()
            if command is not None:
                _past.write(folder, arguments_of(self.train, self.args))
                spec = replace(spec, command=command)
            elif config.restarts or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                raise BadInput(
                    "workers of an interactive session, a thread or a child process are forks of "
                    "it: they are not started again (SHOAL_RESTART), nor where it has used CUDA; "
                    "put the training function into a file, and call shoal.run in its main thread"
                )
            else:
                spec = replace(spec, body=partial(self._in_fork, strategy))
            is_session = not hasattr(sys.modules["__main__"], "__file__")
            shows_name = is_shown and (is_session or sys.stderr.isatty())
            launch(replace(spec, shows_name=shows_name), print_lines if is_shown else discard_lines)
            return handed_back(folder)

    def _in_fork(self, strategy: Strategy, config: RunConfig) -> None:
        torch.set_num_threads(1)
        self.train_here(bound(self.train, self.args), strategy, detect(config), config)


def _command_of_script() -> list[str] | None:
    """How to start this script again; None where workers are forks of this process.

    In an interactive session; in a thread, which the script might start in another order; in a
    process of a pool, whose script would make the pool again.
    """
    if _is_child() or threading.current_thread() is not threading.main_thread():
        return None
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        return None
    return [sys.executable, str(file), *sys.argv[1:]]
