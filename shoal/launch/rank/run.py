"""`shoal.run`: become a worker if a launcher has started this process, else run or launch.

python train.py                      one worker, in this process
shoal run train.py -n 4 -s ddp       this process is one of four: RunConfig has its rank
torchrun, mpirun, srun               the same, from their variables
dist.init_process_group(...)         one of its ranks, where no variable says more
shoal.run(train, workers=4)          start the script again as four workers, and wait
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.errors import BadInput
from shoal.launch.losses.failures import end_with_sentence, report_failure
from shoal.launch.rank.environment import Placement, detect
from shoal.launch.rank.worker import Train, Worker
from shoal.runtime.config import RunConfig
from shoal.runtime.launched_worker import allow_training
from shoal.runtime.wording import say
from shoal.strategy.base import Term
from shoal.strategy.strategy import Strategy, as_strategy
from shoal.train.callbacks import Callback

_calls = 0
_replacement: Callable[[Train], Any] | None = None


def run(
    train: Train,
    *,
    strategy: str | Strategy | Term | None = None,
    workers: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> Any:
    """Run `train(job)` under a strategy.

    With one worker it runs in this process and returns what `train` returns. With `workers`
    above 1 the script is started again as that many processes; returns None when they have
    finished. Options of a launcher (`shoal run -n 4 -s ddp --seed 1`, `SHOAL_STRATEGY`, …)
    override the arguments here. `strategy="auto"` measures this machine once, plans for the
    model, says what it chose and why, and runs that. The methods of `callbacks` are
    called after steps, evaluations, checkpoints and losses of workers, on the first worker.
    """
    global _calls
    if _replacement is not None:
        return _replacement(train)
    end_with_sentence()
    allow_training()
    _calls += 1
    if _calls > 1:
        gc.collect()  # the model of the run before may be in cycles, which are few and large
    config = RunConfig.from_environment()
    if config.call is not None and config.call != _calls:
        return None  # this process was started for another call of shoal.run in the script
    placement = detect(config) or _in_process_group(config)
    size = placement.size if placement else workers or 1
    chosen = config.strategy or strategy or ("ddp" if size > 1 else "single")
    config = replace(
        config, seed=seed if config.seed is None else config.seed, device=config.device or device
    )
    if chosen == "auto":
        chosen = _choose(train, size, placement, config)
    if placement is None and size > 1:
        return _launch_self(train, as_strategy(chosen), size, config, callbacks=callbacks)

    folder = config.run_dir or config.host_dir
    is_ours = placement is not None and (config.is_launched or config.host_dir)
    try:
        worker = Worker(as_strategy(chosen), placement, config, _calls)
        worker.callbacks = callbacks
        result = worker.run(train)
    except Exception as error:
        if placement is None or not is_ours:
            raise
        if folder is not None:  # where the launcher reads why it failed
            report_failure(folder, placement.rank, error)
        sys.exit(2 if isinstance(error, BadInput) else 1)
    if is_ours and config.call is not None:
        sys.exit(0)  # the rest of the script belongs to the process that launched this one
    return result


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


def _choose(train: Train, workers: int, placement: Placement | None, config: RunConfig) -> Strategy:
    """What `strategy="auto"` stands for."""
    if placement is None:
        from shoal.launch.rank.auto import choose_strategy

        def trace_self(workers: int, config: RunConfig) -> None:
            """Run the script once in processes of its own, without its output."""
            strategy = as_strategy(config.strategy or "single")
            _launch_self(train, strategy, workers, config, is_shown=False)

        return choose_strategy(workers, config, trace_self, say)
    if placement.rank == 0:
        say("auto: ddp, for workers of another launcher have to start with a strategy")
    return as_strategy("ddp" if workers > 1 else "single")


def _launch_self(
    train: Train,
    strategy: Strategy,
    workers: int,
    config: RunConfig,
    is_shown: bool = True,
    callbacks: Sequence[Callback] = (),
) -> None:
    from shoal.launch.here.local import LaunchSpec, launch
    from shoal.launch.here.output import discard_lines, print_lines
    from shoal.launch.here.process_config import replication_of
    from shoal.launch.losses.lost_workers import taking_back, tolerance_of

    strategy.require_built()
    strategy.layout(workers)
    if config.takes_back:
        strategy = taking_back(strategy, workers)
    config = replace(config, strategy=str(strategy), call=_calls)
    servers = strategy.servers(workers)
    tolerance = tolerance_of(strategy, workers, config.restarts, config.start, config.min_workers)
    replication = replication_of(strategy, workers, config.restarts)
    spec = LaunchSpec((), workers, config, servers, tolerance=tolerance, replication=replication)
    command = _command_of_script()
    if command is not None:
        shows_name = is_shown and sys.stderr.isatty()
        write = print_lines if is_shown else discard_lines
        launch(replace(spec, command=command, shows_name=shows_name), write)
        return
    if config.restarts or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise BadInput(
            "workers of an interactive session are forks of it: they are not started again "
            "(SHOAL_RESTART), nor where it has used CUDA; put the training function into a file"
        )

    def body(worker_config: RunConfig) -> None:
        torch.set_num_threads(1)
        worker = Worker(strategy, detect(worker_config), worker_config, _calls)
        worker.callbacks = callbacks
        worker.run(train)

    launch(replace(spec, body=body, shows_name=True))


def _command_of_script() -> list[str] | None:
    """How to start this script again; None in an interactive session."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        return None
    return [sys.executable, str(file), *sys.argv[1:]]
