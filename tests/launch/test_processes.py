"""Processes that a launcher starts and watches."""

from __future__ import annotations

import os
import queue
import sys

from shoal.launch.here.processes import Processes, ProcessExit


def test_the_data_loaders_of_a_killed_worker_end_with_it() -> None:
    """Its pipe of stdout is closed when none of its children has it any more."""
    command = ["sh", "-c", "sleep 600 & kill -9 $$"]
    with Processes(lambda exit: None) as processes:
        out, err = processes.start(command, dict(os.environ))
        processes.watch()
        try:
            assert os.read(out, 1) == b""
        finally:
            os.close(out)
            os.close(err)


def test_a_fork_that_has_ended_before_the_next_one_is_started_is_noticed() -> None:
    """Where multiprocessing starts a process it reaps those that have ended."""
    exits: queue.SimpleQueue[ProcessExit] = queue.SimpleQueue()
    with Processes(exits.put) as processes:
        processes.fork(sys.exit, 3)
        os.waitid(os.P_PID, processes.pid_of(0), os.WEXITED | os.WNOWAIT)
        processes.fork(sys.exit, 4)
        processes.watch()
        found = sorted(exits.get(timeout=60)[:2] for _ in range(2))
    assert found == [(0, 3), (1, 4)]
