"""Named points in the code at which tests kill or stop a process; unless armed they do nothing.

    failpoint("push.logged")                    in the code
    SHOAL_FAILPOINTS=push.logged:kill@3         the process is killed the third time it gets there
    SHOAL_FAILPOINTS=election.before:stop       ... stopped (SIGSTOP) the first time
    SHOAL_FAILPOINTS=splice:kill+               ... the first time after RUN_DIR/armed was made

A process arms what its configuration names where it starts (`arm`).

    push.received, validated, deduplicated      a server has the metadata of a push; has checked
                                                it; has found that it does not know it yet
    push.logged, replicated, applied            ... has it in its log, has sent nothing yet; knows
                                                that all members have it; has applied it
    push.acknowledged                           ... has answered the worker, or its predecessor
    election.before, after                      a configuration is about to be written; is written
    splice                                      a tail has stopped committing, to add a member
    snapshot.begin                              a state is about to be copied
    snapshot.temporary, fsync, rename           a file: is written, is on the disk, has its name;
                                                a learner: has a part, has all, has installed it
    store.begin, partial, temporary, fsync, rename  the store of the coordinator: as a file above
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.errors import BadInput
from shoal.runtime.run_dir import RunDir

_SPEC = re.compile(r"([a-z_]+(?:\.[a-z_]+)*):(kill|stop)(?:@([1-9][0-9]{0,8}))?(\+)?")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
armed: dict[str, Callable[[], None]] = {}  # by name: what is done there


def failpoint(name: str) -> None:
    """Do here what was armed under this name."""
    if armed:
        act = armed.get(name)
        if act is not None:
            act()


def arm(specs: Sequence[str], run_dir: RunDir | None = None) -> None:
    """From now on this process does what `specs` (RunConfig.failpoints) say."""
    for spec in specs:
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise BadInput(f"SHOAL_FAILPOINTS has {spec!r}: use NAME:kill, NAME:stop, NAME:kill@3")
        name, action, passage, is_later = match.groups()
        gate = run_dir.armed if is_later and run_dir is not None else None
        armed[name] = _passages(_SIGNALS[action], int(passage or 1), gate)


def _passages(number: signal.Signals, nth: int, gate: Path | None) -> Callable[[], None]:
    """Sends this process a signal the n-th time; not before the file `gate` is there."""
    left = nth

    def passed() -> None:
        nonlocal left
        if gate is None or gate.exists():
            left -= 1
            if left == 0:
                os.kill(os.getpid(), number)

    return passed
