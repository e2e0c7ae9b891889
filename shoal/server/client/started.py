"""The servers that a worker starts: as a thread, or as processes that end with it.

Where they have copies the first worker starts a coordinator, too, unless there is one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shoal.errors import BadInput
from shoal.runtime.config import RunConfig, ServerConfig
from shoal.runtime.files import remove_locked
from shoal.runtime.memory_limit import threads_of
from shoal.runtime.parent_death import in_child
from shoal.runtime.run_dir import RunDir, new_server_dir
from shoal.runtime.variable_text import LaunchedServer
from shoal.server.coordinator.client import own_keys
from shoal.server.coordinator.etcd_gateway import is_etcd
from shoal.server.process.server import Server
from shoal.server.process.shard_file import ShardSaver
from shoal.strategy.ps_term import Ps

if TYPE_CHECKING:
    from shoal.server.client.discovery import Introduction

_IDLE_AFTER_FAILURE_S = 5.0
_START_TIMEOUT_S = 120.0
_POLL_S = 0.01


class StartedServers:
    """The servers that this process has started, as a thread or as processes."""

    def __init__(self, met: Introduction, config: RunConfig):
        self.secret = met.announcer.secret
        self.config = config
        self.processes: dict[int | None, subprocess.Popen[bytes]] = {}  # None: the coordinator
        self.server: Server | None = None
        self._host = met.host
        self._is_for_others = len(met.topology.hosts) > 1
        self._run_dir: RunDir | None = None
        self._keys = ExitStack()  # in etcd, which this worker removes at the end

    def launch(self, term: Ps, index: int) -> None:
        """Start process `index`, of servers that are processes; `address_of` waits for it."""
        listen = self.config.server.listen
        server = ServerConfig(
            index, listen, self._beyond(), os.getpid(), term.replicas, term.consistency
        )
        config = replace(self.config, run_dir=self._folder(), server=server, launcher_pid=None)
        env = config.with_environ(**threads_of(term.servers * term.replicas)).to_environment()
        self._popen(index, "shoal.server.main", env)

    def address_of(self, index: int) -> LaunchedServer:
        """Of a process that was launched; for other hosts once it listens."""
        folder = self._folder()
        return self._announced(index, folder.socket(index), folder.server_address(index))

    def host(self, term: Ps, index: int) -> LaunchedServer:
        """Start server `index` as a thread of this process."""
        local = self._folder().socket(index)
        run_dir = self.config.run_dir
        has_exited = None if run_dir is None else run_dir.has_exited
        self.server = Server(local, self.secret, has_exited, self._beyond() or "", self.config.tls)
        if term.on != "cpu":
            self.server.host.device = device_of_server(term)
        folder = self.config.server_checkpoint.folder
        if folder is not None:
            self.server.host.saver = ShardSaver(folder, "a server")
        return self._address(self.server.address, self.server.remote_address)

    # ------------------------------------------------------------------ the coordinator

    def start_coordinator(self) -> LaunchedServer:
        """The one that SHOAL_COORDINATOR names, or a process that ends with this one."""
        if self.config.coordinator is not None:
            if is_etcd(self.config.coordinator):
                config = replace(self.config, secret=self.secret)
                self._keys.enter_context(own_keys(config, "rank 0"))
            return LaunchedServer(self.config.coordinator)
        folder = self._folder()
        config = replace(
            self.config,
            run_dir=folder,
            coordinator_beyond=self._beyond(),
            server=ServerConfig(),
            launcher_pid=os.getpid(),
        )
        self._popen(None, "shoal.server.coordinator.main", config.to_environment())
        return self._announced(None, folder.coordinator, folder.coordinator_address)

    # ------------------------------------------------------------------ the end

    def close(self, failed: bool) -> None:
        """End them when no worker uses them; after a failure, after a few seconds."""
        if self.server is not None:
            self.server.wait_idle(_IDLE_AFTER_FAILURE_S if failed else None)
            self.server.close()
            self.server = None
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait()
        self.processes = {}
        self._keys.close()
        if self._run_dir is not None:
            remove_locked(self._run_dir.path)
            self._run_dir = None

    # ------------------------------------------------------------------ processes

    def _folder(self) -> RunDir:
        if self._run_dir is None:
            self._run_dir = new_server_dir()
            self._run_dir.write_secret(self.secret)
        return self._run_dir

    def _beyond(self) -> str | None:
        """Where to listen for other hosts, if there are any."""
        host = self.config.hostname or socket.gethostname()
        return f"tcp:{host}:0" if self._is_for_others else None

    def _popen(self, index: int | None, module: str, env: dict[str, str]) -> None:
        """A coordinator does not get the Ctrl-C of a terminal, and is killed with this process."""
        is_apart = index is None
        self.processes[index] = subprocess.Popen(
            [sys.executable, "-m", module],
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=is_apart,
            preexec_fn=in_child(os.getpid()) if is_apart else None,
        )

    def _address(self, local: str, remote: str) -> LaunchedServer:
        return LaunchedServer(remote, local, self._host) if remote else LaunchedServer(local)

    def _announced(self, index: int | None, local: str, file: Path) -> LaunchedServer:
        """With the address that a process writes to a file once it listens for other hosts."""
        if not self._is_for_others:
            return LaunchedServer(local)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not file.exists():
            if self.processes[index].poll() is not None or time.monotonic() > deadline_s:
                whose = "the coordinator" if index is None else f"server {index}"
                raise BadInput(f"{whose} does not listen at {self._beyond()}: see its output")
            time.sleep(_POLL_S)
        return self._address(local, file.read_text())


def device_of_server(term: Ps) -> torch.device:
    """The GPU of the worker whose thread the server is."""
    if not torch.cuda.is_available():
        raise BadInput(f'{term} keeps weights on a GPU, and there is no CUDA here: use on="cpu"')
    return torch.device("cuda", torch.cuda.current_device())
