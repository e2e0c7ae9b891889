"""Where ranks that were asked to stop agree on a step.

LauncherBoard          files in the run directory, under Shoal's own launcher
comm/store_board.py    the store of torch.distributed, under torchrun, srun, mpirun
"""

from __future__ import annotations

import time
from typing import Protocol

from shoal.runtime.run_dir import RunDir

_PATIENCE_S = 1.0  # for the launcher's mark
_POLL_S = 0.02


class StopBoard(Protocol):
    """What ranks write for each other. A step that is written is never changed."""

    def announce(self) -> bool:
        """This process got the signal. False: it is for this process alone, which ends."""
        ...

    def all_heard(self) -> bool:
        """Whether every rank looks for the last step before it begins another one."""
        ...

    def last_step(self) -> int | None:
        """The step after which all ranks stop; None as long as it is not chosen."""
        ...

    def write_last_step(self, steps: int) -> None: ...

    def note_step(self, rank: int, steps: int) -> None: ...

    def noted_steps(self) -> dict[int, int]: ...

    def has_exited(self, rank: int) -> bool: ...


class LauncherBoard:
    """In the run directory, where the launcher marks that the run is preempted."""

    def __init__(self, run_dir: RunDir):
        self._run_dir = run_dir
        self.last_step = run_dir.last_step
        self.write_last_step = run_dir.write_last_step
        self.note_step = run_dir.note_step
        self.noted_steps = run_dir.noted_steps
        self.has_exited = run_dir.has_exited

    def announce(self) -> bool:
        """A signal to all processes of a job may come here before the launcher has marked it."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while not self._run_dir.is_preempted():
            if self._run_dir.is_ending() or time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def all_heard(self) -> bool:
        return True  # a rank reads the file before every step
