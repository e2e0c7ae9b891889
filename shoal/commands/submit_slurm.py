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
from pathlib import Path

from shoal.commands.submit_request import MARK, SubmitRequest, seconds_of
from shoal.errors import BadInput
from shoal.runtime.preemption import EXIT_STATUS

_WORD = re.compile(r"[\w.,:@%+=/*\[\]-]+", re.ASCII)
_ARRAY = re.compile(r"--array\b|-a")
_BAD_INPUT = 2  # a mistake that a second start does not mend


def slurm_script(asked: SubmitRequest) -> str:
    """The text of the script."""
    lines = [
        "#!/bin/bash",
        f"# written by {MARK}",
        *(f"#SBATCH {line}" for line in _directives(asked)),
        "",
        *(f"export {name}={shlex.quote(value)}" for name, value in asked.environ.items()),
        *(asked.setup or ()),
        "",
        _TRAPS,
        f"{shlex.join(['srun', '--kill-on-bad-exit=1', *_srun(asked), *asked.command])} &",
        _WAIT,
        *_starting_again(asked),
        'exit "$status"',
        "",
    ]
    return "\n".join(lines)


def _srun(asked: SubmitRequest) -> Iterator[str]:
    if asked.cpus is not None:
        yield f"--cpus-per-task={asked.cpus}"  # since Slurm 22.05 srun does not take it from sbatch
    for option in asked.srun or ():
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


def _directives(asked: SubmitRequest) -> Iterator[str]:
    """Lines of the user come last: they count more."""
    given = {
        "job-name": asked.name,
        "nodes": asked.nodes,
        "ntasks": asked.workers,
        "ntasks-per-node": asked.workers_per_node,
        "cpus-per-task": asked.cpus,
        "gpus-per-node": asked.gpus_per_node or None,
        "gpus": asked.gpus,
        "mem": asked.memory,
        "time": asked.time,
        "partition": asked.partition,
        "account": asked.account,
        "output": _log(asked.log),
    }
    for name, value in given.items():
        if value is not None:
            yield f"--{name}={_checked(name, str(value))}"
    if asked.requeues or asked.max_restarts:
        yield "--requeue"
        yield "--open-mode=append"
    if asked.requeues:
        if asked.time is not None and asked.notice >= seconds_of(asked.time):
            raise BadInput(
                f"--notice {asked.notice} s before the end of --time {asked.time} is before the "
                "start: give more time or less notice"
            )
        yield f"--signal=B:USR1@{asked.notice}"  # so long before the time limit, if there is one
    for line in asked.line or ():
        if not line.startswith("-") or not line.isprintable():
            raise BadInput(f"--line takes an option of sbatch such as --constraint=a100: {line!r}")
        if _ARRAY.match(line) and (asked.requeues or asked.max_restarts):
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


def _starting_again(asked: SubmitRequest) -> Iterator[str]:
    requeue = 'exec scontrol requeue "$SLURM_JOB_ID"'
    if asked.requeues:
        yield f'if [ "$asked" = 1 ] && [ "$status" = {EXIT_STATUS} ]; then {requeue}; fi'
    if asked.max_restarts:
        is_crash = f'[ "$asked$ended" = 00 ] && [ "$status" != 0 ] && [ "$status" != {_BAD_INPUT} ]'
        is_left = f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {asked.max_restarts} ]'
        yield f"if {is_crash} && {is_left}; then {requeue}; fi"
