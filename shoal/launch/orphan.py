"""A rank that torchrun has started ends when torchrun does.

An agent that is killed cannot end its ranks. They would train on beside those of the next start,
or wait for a store that its process had. The kernel gives them another parent.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shoal.errors import ShoalError
from shoal.launch.environment import Placement
from shoal.runtime.waits import Backoff

_POLL_S = 1.0
_CONNECT_S = 20.0  # agents listen before they start ranks
_ANSWER_S = 5.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


@contextmanager
def ending_with_agent(rank: int, environ: Mapping[str, str]) -> Iterator[None]:
    """While the block runs under torchrun, this process ends with its parent."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        yield  # a script that was started in a shell may survive it
        return
    is_over = threading.Event()
    parent = os.getppid()
    watch = threading.Thread(
        target=_watch, args=(rank, parent, is_over), name="shoal-agent", daemon=True
    )
    watch.start()
    try:
        yield
    except (ShoalError, RuntimeError):  # another rank has seen it before, and is lost for this one
        _end_without(parent, rank)
        raise
    finally:
        is_over.set()
        watch.join()


def _watch(rank: int, parent: int, is_over: threading.Event) -> None:
    while not is_over.wait(_POLL_S):
        _end_without(parent, rank)


def _end_without(parent: int, rank: int) -> None:
    """End this process with a sentence, if its parent has ended."""
    if os.getppid() != parent:
        print(
            f"shoal: rank {rank} ends: torchrun, which has started it, was killed",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


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
