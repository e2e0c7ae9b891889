"""Start a run on lent hosts again after a loss: `shoal run --on ENGINE --restart N`.

The engine is asked for hosts again, and may have replaced the one that was lost. All workers are
started, with a new rendezvous. The script runs from its start; what it loads (`job.load`,
`--server-checkpoint`) is what it goes on from.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.errors import ServerFailed, WorkersFailed
from shoal.launch.local import LaunchSpec, RunResult
from shoal.launch.machines import Machines
from shoal.launch.output import OnProgress, Write, print_lines
from shoal.launch.remote import run_remote
from shoal.runtime.config import RunConfig
from shoal.server.saving.folder import complete_versions


def run_attempts(
    machines: Machines,
    spec: LaunchSpec,
    write: Write = print_lines,
    on_progress: OnProgress | None = None,
) -> RunResult:
    """As `run_remote`. An error of the script is no loss, and would come again."""
    if spec.tolerance is not None:  # only lost workers are started again
        return run_remote(machines, spec, write, on_progress)
    restarts = spec.config.restarts or 0
    spec = replace(spec, config=replace(spec.config, restarts=None))
    for count in range(1, restarts + 1):
        try:
            return run_remote(machines, spec, write, on_progress)
        except (WorkersFailed, ServerFailed) as error:
            if not error.is_loss:
                raise
            write(
                f"shoal: {_loss(error)}; all workers are started again ({count} of {restarts})\n",
                True,
            )
        spec = replace(spec, config=_after_loss(spec.config), appends_logs=True)
    return run_remote(machines, spec, write, on_progress)


def _loss(error: WorkersFailed | ServerFailed) -> str:
    """Its last line, where a worker has reported the loss of a peer with a traceback."""
    lines = str(error).strip().splitlines()
    if len(lines) == 1 or isinstance(error, ServerFailed):
        return lines[0].rstrip(":")  # what a lost server has printed last was shown
    return f"worker {error.rank} failed: {lines[-1]}"


def _after_loss(config: RunConfig) -> RunConfig:
    """--kill has killed; servers go on from their latest checkpoint."""
    saved = config.server_checkpoint
    has_saved = saved.folder is not None and bool(complete_versions(saved.folder))
    resume = saved.resume or has_saved
    return replace(config, kill=(), server_checkpoint=replace(saved, resume=resume))
