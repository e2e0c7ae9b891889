"""The servers that a worker starts: as a thread, or as processes that end with it.

Where they have copies the first worker starts a coordinator, too, unless there is one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from shoal.coordinator.connect import open_coordinator
from shoal.coordinator.etcd.coordinator import EtcdCoordinator
from shoal.coordinator.interface import CoordinatorError
from shoal.errors import BadInput, ShoalError
from shoal.runtime.config import RunConfig, ServerConfig
from shoal.runtime.cores import threads_of
from shoal.runtime.parent_death import in_child
from shoal.runtime.run_dir import RunDir, new_server_dir
from shoal.server.process.background import ShardSaver
from shoal.server.process.server import Server
from shoal.strategy.sync_terms.ps import Ps

_IDLE_AFTER_FAILURE_S = 5.0
_START_TIMEOUT_S = 120.0
_POLL_S = 0.01


class ServerAddress(NamedTuple):
    """Where a server listens: at a socket of its host, and for other hosts if there are any."""

    host: str
    local: str
    remote: str

    def seen_from(self, host: str) -> str:
        return self.local if host == self.host or not self.remote else self.remote

    def encode(self) -> bytes:
        return "\n".join(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> ServerAddress:
        words = data.decode(errors="replace").split("\n")
        if len(words) != 3:
            raise ShoalError("the address of a server is not one")
        return cls(*words)


class StartedServers:
    """The servers that this process has started, as a thread or as processes."""

    def __init__(self, secret: bytes, config: RunConfig, run_dir: RunDir | None = None):
        """`run_dir` holds the secret already, where this worker has made it."""
        self.secret = secret
        self.config = config
        self.processes: list[subprocess.Popen[bytes]] = []
        self.server: Server | None = None
        self._launched: dict[int, subprocess.Popen[bytes]] = {}
        self._run_dir = run_dir
        self._keys: EtcdCoordinator | None = None  # which this worker removes at the end

    def launch(self, term: Ps, index: int, is_for_others: bool) -> None:
        """Start process `index`, of servers that are processes; `address_of` waits for it."""
        remote = self._beyond() if is_for_others else None
        listen = self.config.server.listen
        server = ServerConfig(index, listen, remote, os.getpid(), term.replicas, term.consistency)
        config = replace(self.config, run_dir=self._folder(), server=server, launcher_pid=None)
        env = config.with_environ(**threads_of(term.servers * term.replicas)).to_environment()
        self._launched[index] = self._popen("shoal.server.main", env)

    def address_of(self, index: int, host: str, is_for_others: bool) -> ServerAddress:
        """Of a process that was launched; for other hosts once it listens."""
        local = self._folder().socket(index)
        file = self._folder().server_address(index)
        remote = ""
        if is_for_others:
            remote = self._announced(file, f"server {index}", self._launched[index])
        return ServerAddress(host, local, remote)

    def host(self, term: Ps, index: int, host: str, is_for_others: bool) -> ServerAddress:
        """Start server `index` as a thread of this process."""
        local = self._folder().socket(index)
        run_dir = self.config.run_dir
        self.server = Server(
            local,
            self.secret,
            has_exited=None if run_dir is None else run_dir.has_exited,
            remote_address=self._beyond() if is_for_others else "",
            tls=self.config.tls,
        )
        if term.on != "cpu":
            self.server.host.device = device_of_server(term)
        folder = self.config.server_checkpoint.folder
        if folder is not None:
            self.server.host.saver = ShardSaver(folder, "a server")
        return ServerAddress(host, local, self.server.remote_address)

    # ------------------------------------------------------------------ the coordinator

    def start_coordinator(self, host: str, is_for_others: bool) -> ServerAddress:
        """The one that SHOAL_COORDINATOR names, or a process that ends with this one."""
        if self.config.coordinator is not None:
            self._clear_keys()
            return ServerAddress(host, self.config.coordinator, "")
        folder = self._folder()
        beyond = self._beyond() if is_for_others else None
        config = replace(
            self.config,
            run_dir=folder,
            coordinator_beyond=beyond,
            server=ServerConfig(),
            launcher_pid=os.getpid(),
        )
        process = self._popen("shoal.coordinator.main", config.to_environment(), apart=True)
        remote = ""
        if is_for_others:
            remote = self._announced(folder.coordinator_address, "the coordinator", process)
        return ServerAddress(host, folder.coordinator, remote)

    def use_coordinator(self, address: str) -> None:
        """For the servers that are launched from now on."""
        self.config = replace(self.config, coordinator=address)

    def _clear_keys(self) -> None:
        """A run before this one, with the same secret, may have left some."""
        config = replace(self.config, secret=self.secret)
        coordinator = open_coordinator(config, "rank 0")
        if not isinstance(coordinator, EtcdCoordinator):
            coordinator.close()
            return
        self._keys = coordinator
        try:
            coordinator.remove_all()
        except CoordinatorError as error:
            reason = f"SHOAL_COORDINATOR is {self.config.coordinator}: {error}"
            raise BadInput(reason) from error

    # ------------------------------------------------------------------ the end

    def close(self, failed: bool = False) -> None:
        """End them when no worker uses them; after a failure, after a few seconds."""
        if self.server is not None:
            self.server.wait_idle(_IDLE_AFTER_FAILURE_S if failed else None)
            self.server.close()
            self.server = None
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
        self.processes = []
        if self._keys is not None:
            with suppress(CoordinatorError), closing(self._keys):
                self._keys.remove_all()
            self._keys = None
        if self._run_dir is not None:
            self._run_dir.remove()
            self._run_dir = None

    # ------------------------------------------------------------------ processes

    def _folder(self) -> RunDir:
        if self._run_dir is None:
            self._run_dir = new_server_dir()
            self._run_dir.write_secret(self.secret)
        return self._run_dir

    def _beyond(self) -> str:
        return f"tcp:{self.config.hostname or socket.gethostname()}:0"

    def _popen(
        self, module: str, env: dict[str, str], apart: bool = False
    ) -> subprocess.Popen[bytes]:
        """`apart`: it does not get the Ctrl-C of a terminal, and is killed with this process."""
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=apart,
            preexec_fn=in_child(os.getpid()) if apart else None,
        )
        self.processes.append(process)
        return process

    def _announced(self, file: Path, whose: str, process: subprocess.Popen[bytes]) -> str:
        """The address that a process writes once it listens for other hosts."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not file.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise BadInput(f"{whose} does not listen at {self._beyond()}: see its output")
            time.sleep(_POLL_S)
        return file.read_text()


def device_of_server(term: Ps) -> torch.device:
    """The GPU of the worker whose thread the server is."""
    if not torch.cuda.is_available():
        raise BadInput(f'{term} keeps weights on a GPU, and there is no CUDA here: use on="cpu"')
    return torch.device("cuda", torch.cuda.current_device())
