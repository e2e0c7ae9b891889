"""A batch script for Slurm: srun starts one task for each worker.

    Slurm        SIGUSR1 to this script, a while before the time limit (--signal=B:USR1@60)
    script       SIGUSR1 to srun, which passes it on to the tasks
    tasks        stop after the same step, save, exit with 143
    script       scontrol requeue; the next start goes on from the checkpoint

A job that Slurm preempts is requeued by Slurm itself (--requeue). `scancel` ends a job for good.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import BadInput
from shoal.launch.managers.submit_spec import MARK, SubmitSpec, seconds_of
from shoal.runtime.preemption import EXIT_STATUS

_WORD = re.compile(r"[\w.,:@%+=/*\[\]-]+", re.ASCII)
_ARRAY = re.compile(r"--array\b|-a")
_BAD_INPUT = 2  # a mistake that a second start does not mend


@dataclass(frozen=True)
class SlurmOptions:
    """What only Slurm knows."""

    partition: str | None = None
    account: str | None = None
    output: str | None = None  # %j is the number of the job
    gpus: int | None = None  # of all nodes together
    lines: tuple[str, ...] = ()  # options of sbatch, such as --constraint=a100
    setup: tuple[str, ...] = ()  # lines of shell before srun, such as module load cuda
    srun: tuple[str, ...] = ()  # options of srun, such as --container-image=IMAGE


def slurm_script(spec: SubmitSpec, options: SlurmOptions) -> str:
    """The text of the script."""
    lines = [
        "#!/bin/bash",
        f"# written by {MARK}",
        *(f"#SBATCH {line}" for line in _directives(spec, options)),
        "",
        *(f"export {name}={shlex.quote(value)}" for name, value in spec.environ.items()),
        *options.setup,
        "",
        _TRAPS,
        f"{shlex.join(['srun', '--kill-on-bad-exit=1', *_srun(spec, options), *spec.command])} &",
        _WAIT,
        *_starting_again(spec),
        'exit "$status"',
        "",
    ]
    return "\n".join(lines)


def _srun(spec: SubmitSpec, options: SlurmOptions) -> Iterator[str]:
    if spec.cpus is not None:
        yield f"--cpus-per-task={spec.cpus}"  # since Slurm 22.05 srun does not take it from sbatch
    for option in options.srun:
        if not option.startswith("-"):
            raise BadInput(f"--srun takes an option of srun such as --cpu-bind=cores: {option!r}")
        yield option


# before srun: a signal that comes early is passed on, too
_TRAPS = """\
asked=0 ended=0
trap 'interrupted=1 asked=1; kill -USR1 "$!" 2>/dev/null' USR1
trap 'interrupted=1 ended=1; kill -TERM "$!" 2>/dev/null' TERM"""
_WAIT = """\
step=$!
[ "$asked" = 0 ] || kill -USR1 "$step" 2>/dev/null
[ "$ended" = 0 ] || kill -TERM "$step" 2>/dev/null
while
    interrupted=0
    wait "$step"
    status=$?
    [ "$interrupted" = 1 ]  # the signal has ended the wait, not srun
do :; done"""


def _directives(spec: SubmitSpec, options: SlurmOptions) -> Iterator[str]:
    """Lines of the user come last: they count more."""
    given = {
        "job-name": spec.name,
        "nodes": spec.nodes,
        "ntasks": spec.workers,
        "ntasks-per-node": spec.workers_per_node,
        "cpus-per-task": spec.cpus,
        "gpus-per-node": spec.gpus_per_node or None,
        "gpus": options.gpus,
        "mem": spec.memory,
        "time": spec.time,
        "partition": options.partition,
        "account": options.account,
        "output": _log(options.output),
    }
    for name, value in given.items():
        if value is not None:
            yield f"--{name}={_checked(name, str(value))}"
    if spec.requeue or spec.restarts:
        yield "--requeue"
        yield "--open-mode=append"
    if spec.requeue:
        if spec.time is not None and spec.notice_s >= seconds_of(spec.time):
            raise BadInput(
                f"--notice {spec.notice_s} s before the end of --time {spec.time} is before the "
                "start: give more time or less notice"
            )
        yield f"--signal=B:USR1@{spec.notice_s}"  # so long before the time limit, if there is one
    for line in options.lines:
        if not line.startswith("-") or not line.isprintable():
            raise BadInput(f"--line takes an option of sbatch such as --constraint=a100: {line!r}")
        if _ARRAY.match(line) and (spec.requeue or spec.restarts):
            raise BadInput(f"--line={line}: all tasks of an array would go on from one checkpoint")
        yield line


def _log(path: str | None) -> str | None:
    """Slurm ends a job without a word if its output has no folder."""
    folder = Path(path or "").parent
    if "%" not in str(folder) and not folder.is_dir():
        raise BadInput(f"--log {path}: there is no folder {folder}, and Slurm makes none")
    return path


def _checked(name: str, text: str) -> str:
    """sbatch reads these lines, and not the shell: nothing is quoted."""
    if _WORD.fullmatch(text) is None:
        raise BadInput(f"--{name} {text!r}: use letters, digits and . , : @ % + = / * [ ] _ -")
    return text


def _starting_again(spec: SubmitSpec) -> Iterator[str]:
    requeue = 'exec scontrol requeue "$SLURM_JOB_ID"'
    if spec.requeue:
        yield f'if [ "$asked" = 1 ] && [ "$status" = {EXIT_STATUS} ]; then {requeue}; fi'
    if spec.restarts:
        is_crash = f'[ "$asked$ended" = 00 ] && [ "$status" != 0 ] && [ "$status" != {_BAD_INPUT} ]'
        is_left = f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {spec.restarts} ]'
        yield f"if {is_crash} && {is_left}; then {requeue}; fi"
