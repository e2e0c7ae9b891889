"""The configuration of each process that a launcher on this host starts."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from shoal.launch.replication import SINGLE_COPY, Replication
from shoal.runtime.config import RunConfig
from shoal.runtime.cores import threads_of
from shoal.runtime.run_dir import RunDir

SERVER_COMMAND = (sys.executable, "-m", "shoal.server.main")


def worker_config(
    config: RunConfig, run_dir: RunDir, rank: int, workers: int, servers: int
) -> RunConfig:
    """The launcher's configuration, and this worker's rank in the run."""
    return replace(
        config,
        rank=rank,
        size=workers,
        local_rank=rank,
        local_size=workers,
        rendezvous=run_dir.rendezvous,
        run_dir=run_dir,
        servers=servers or config.servers,
    )


def server_config(
    config: RunConfig,
    run_dir: RunDir,
    index: int,
    workers: int,
    servers: int,
    replication: Replication = SINGLE_COPY,
) -> RunConfig:
    """A server knows the number of workers, and has no rank itself."""
    role = replace(
        config.server,
        index=index,
        replicas=replication.replicas,
        consistency=replication.consistency,
    )
    server = replace(
        config,
        rank=None,
        size=workers,
        local_rank=None,
        local_size=None,
        rendezvous=None,
        run_dir=run_dir,
        servers=servers,
        server=role,
        launcher_pid=os.getpid(),
        progress_fd=None,
    )
    return server.with_environ(**threads_of(servers), PYTHONUNBUFFERED="1")
