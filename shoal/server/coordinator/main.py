"""The coordinator of a run: `python -m shoal.server.coordinator.main`.

It listens at a socket in the run directory, and at `RunConfig.coordinator_beyond` for other
hosts; the port that it gets there is written to coordinator.address in the run directory. Started
again, it goes on from its store. It runs until SIGTERM or SIGINT, or until its launcher ends.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

from shoal.errors import BadInput
from shoal.runtime.config import RunConfig
from shoal.runtime.parent_death import die_with_launcher
from shoal.runtime.run_dir import RunDir
from shoal.server.coordinator.service import CoordinatorService, Core
from shoal.server.coordinator.store_file import StoreFile


def main() -> int:
    try:
        config = RunConfig.from_environment()
        die_with_launcher(config.launcher_pid)
        stop = {signal.SIGTERM, signal.SIGINT}
        signal.pthread_sigmask(signal.SIG_BLOCK, stop)
        service = _open(config)
    except BadInput as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 2
    with service:
        signal.sigwait(stop)
    return 0


def _open(config: RunConfig) -> CoordinatorService:
    run_dir = config.run_dir
    secret = config.read_secret()
    if run_dir is None or secret is None:
        raise BadInput("a coordinator needs a run directory and its secret: set SHOAL_RUN_DIR")
    file = StoreFile(run_dir.coordinator_store)
    addresses = [run_dir.coordinator]
    if config.coordinator_beyond:
        addresses.append(_same_port(run_dir, config.coordinator_beyond))
    with suppress(FileNotFoundError):  # the store is locked: no other coordinator listens there
        os.unlink(run_dir.coordinator.removeprefix("unix:"))
    try:
        service = CoordinatorService(Core(file), secret, addresses, config.tls)
    except BaseException:
        file.close()
        raise
    if config.coordinator_beyond:
        run_dir.note(run_dir.coordinator_address, service.addresses[1])
    return service


def _same_port(run_dir: RunDir, beyond: str) -> str:
    """Where it listened before, if it did: clients know no other address."""
    with suppress(OSError):
        before = run_dir.coordinator_address.read_text()
        if before.rpartition(":")[0] == beyond.rpartition(":")[0]:
            return before
    return beyond


if __name__ == "__main__":
    sys.exit(main())
