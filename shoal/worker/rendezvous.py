"""Rendezvous through a file, for ranks of one host under torchrun, mpirun or Shoal's own launcher.

Others could disturb ranks in the store of torchrun's agent, which is open to every user.

A script may call `shoal.run` twice, and `mpirun -n 2 sh -c 'python a.py; python b.py'` gives
both programs the same variables. Rank 0 may then be at the second rendezvous while rank 1 is
still at the first, and two of them in one file hang. So each visit gets a file of its own:
every rank counts its visits with marks in the job's directory. The last rank to leave removes it.

    /tmp/shoal-1000/               mode 0700, owned by this user; locked while marks change
        key                        between processes of this host: see runtime/trust.py
        mpi-5e1f.../               Placement.rendezvous of one mpirun; torchrun-…
            in-0-0  out-0-0        rank 0 entered (the file holds its pid) and left: visit 0
            in-1-0
            store-0                torch's FileStore of visit 0

Under Shoal's own launcher the two directories are the run directory and `store/` in it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.errors import ShoalError
from shoal.runtime.files import locked, make_private, own_folder
from shoal.runtime.waits import Backoff
from shoal.worker.environment import Placement


@contextmanager
def open_rendezvous(placement: Placement, environ: Mapping[str, str] = {}) -> Iterator[str]:
    """The init_method for torch.distributed; its files exist while the block runs."""
    there = _torchrun_file(placement, environ) or placement.rendezvous
    rank = placement.rank
    if not there.startswith("file://"):
        yield there
        return
    job = Path(there.removeprefix("file://"))
    make_private(job.parent)
    with locked(job.parent, os.O_DIRECTORY):
        for one in {job, *job.parent.glob(f"{job.name.partition('-')[0]}-*")}:
            if _is_abandoned(one):
                shutil.rmtree(one)
        job.mkdir(mode=0o700, exist_ok=True)
        visit = len(list(job.glob(f"in-{rank}-*")))
        (job / f"in-{rank}-{visit}").write_text(str(os.getpid()))
    try:
        yield f"{there}/store-{visit}"
    finally:
        with suppress(FileNotFoundError), locked(job.parent, os.O_DIRECTORY):
            (job / f"out-{rank}-{visit}").touch()
            entered, left = (len(list(job.glob(marks))) for marks in ("in-*", "out-*"))
            if entered == left == placement.size * (visit + 1):
                shutil.rmtree(job)


def _torchrun_file(placement: Placement, environ: Mapping[str, str]) -> str | None:
    """A path that only the ranks of one start by one torchrun compute; None for other ranks.

    torchrun names a new folder, with a random name, for the errors of each start.
    """
    errors = environ.get("TORCHELASTIC_ERROR_FILE")
    if placement.rendezvous != "env://" or placement.local_size < placement.size or not errors:
        return None
    start = f"{Path(errors).parents[1]}\n{environ.get('MASTER_PORT')}"
    return f"file://{own_folder()}/torchrun-{hashlib.sha256(start.encode()).hexdigest()[:32]}"


def _is_abandoned(job: Path) -> bool:
    """Whether a crashed job of the same name left marks: ranks that never left and have exited."""
    inside = [
        mark for mark in job.glob("in-*") if not mark.with_name(f"out{mark.name[2:]}").exists()
    ]
    return bool(inside) and not any(_is_alive(int(mark.read_text())) for mark in inside)


def _is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


_CONNECT_S = 20.0  # agents listen before they start ranks
_ANSWER_S = 5.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


def require_agent_store(placement: Placement, environ: Mapping[str, str]) -> None:
    """ShoalError where torchrun was killed while this rank was starting; torch waits for long."""
    if placement.rendezvous != "env://":
        return
    address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    deadline_s = time.monotonic() + _CONNECT_S
    pause = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while True:
        try:
            socket.create_connection(address, _ANSWER_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise ShoalError(
                    f"rank {placement.rank}: torchrun's agent does not answer at {address[0]}:"
                    f"{address[1]} ({error.strerror or error}): it was killed, or its host is gone"
                ) from error
        pause()
