"""Processes that a launcher starts and watches."""

from __future__ import annotations

import os

from shoal.launch.here.processes import Processes


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
