"""The coordinator of a run with replicated servers: a process beside them, or an etcd cluster.

    with coordinated(replication, config, run_dir, say) as coordinator:
        … start servers and workers with coordinator.config …
        coordinator.watch(see)         # after the last fork: it starts a thread

The process is started again when it dies, from its store; servers go on meanwhile.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace

from shoal.errors import ShoalError
from shoal.launch.here.process_config import Replication
from shoal.launch.losses.lost_servers import follow
from shoal.runtime import clock
from shoal.runtime.config import RunConfig
from shoal.runtime.parent_death import in_child
from shoal.runtime.run_dir import RunDir, signal_name
from shoal.server.coordinator import Coordinator, Listing, forget
from shoal.server.coordinator.client import open_coordinator, own_keys
from shoal.server.coordinator.etcd_gateway import is_etcd

COORDINATOR_COMMAND = (sys.executable, "-m", "shoal.server.coordinator.main")
MAX_RESTARTS = 5
_TERM_S = 5.0
Say = Callable[[str], None]


class RunCoordinator:
    """`config` names the coordinator, for servers and workers.

    With `say`, which prints a line of the launcher, it is a process of this one.
    """

    def __init__(self, config: RunConfig, run_dir: RunDir | None = None, say: Say | None = None):
        self.config = config
        self._run_dir = run_dir
        self._over = clock.Event()
        self._asking: list[tuple[threading.Thread, Coordinator]] = []
        self._changing = clock.Lock()
        self._is_closed = False
        self._watcher: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if run_dir is not None and say is not None:
            self._say = say
            self.config = replace(config, coordinator=run_dir.coordinator)
            own = replace(config, rank=None, local_rank=None, rendezvous=None, progress_fd=None)
            own = replace(own, run_dir=run_dir, launcher_pid=os.getpid())
            self._process_config = own.with_environ(PYTHONUNBUFFERED="1")
            self._process = self._start(self._process_config)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def watch(self, see: Callable[[Listing], None]) -> Callable[[], None]:
        """From now on `see` is called with every change of the chains; returns what looks at once.

        A coordinator of this process that dies is started again.
        """
        client = self._client()
        if self._process is not None:
            name = "shoal-coordinator"
            self._watcher = clock.Thread(target=self._watch, name=name, daemon=True)
            self._watcher.start()
        if client is None:
            return lambda: None

        def look() -> None:
            with suppress(ShoalError, OSError):
                if not self._over.is_set():
                    see(client.list(""))

        self._ask("shoal-chains", client, lambda: follow(client, see, self._over))
        return look

    def _client(self) -> Coordinator | None:
        if self.config.coordinator is None or self._run_dir is None:
            return None
        return open_coordinator(replace(self.config, run_dir=self._run_dir), "the launcher")

    def _ask(self, name: str, client: Coordinator, act: Callable[[], object]) -> None:
        def run() -> None:
            with suppress(ShoalError, OSError), closing(client):
                act()

        thread = clock.Thread(target=run, name=name, daemon=True)
        self._asking.append((thread, client))
        thread.start()

    def server_exited(self, index: int, pid: int) -> None:
        """Say so, in the background: its peers need not wait for the end of its lease."""
        client = self._client()
        if client is not None:
            self._ask("shoal-lost-server", client, lambda: forget(client, index, pid))

    def close(self) -> None:
        """No process, thread or key is left."""
        with self._changing:
            self._is_closed = True
        self._over.set()
        for thread, client in self._asking:
            client.close()  # its waits end
            thread.join()
        if self._process is None:
            return
        with self._process as process:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TERM_S)
            process.kill()
            if self._watcher is not None:
                self._watcher.join()

    def _start(self, config: RunConfig) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            COORDINATOR_COMMAND,
            env=config.to_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=in_child(os.getpid()),
        )

    def _watch(self) -> None:
        """Until it ends for good: print what it writes, start it again from its store."""
        for starts in range(MAX_RESTARTS + 1):
            process = self._process
            assert process is not None and process.stderr is not None
            for line in process.stderr:
                self._say(f"coordinator: {line.decode(errors='replace').rstrip()}")
            code = process.wait()
            ended = f"was killed ({signal_name(-code)})" if code < 0 else f"exited with {code}"
            with self._changing:
                if self._is_closed:
                    return
                process.stderr.close()
                if starts == MAX_RESTARTS:
                    why = "no server that is lost can be replaced now"
                    self._say(f"the coordinator {ended} again: {why}")
                    return
                self._say(
                    f"the coordinator {ended}: started again ({starts + 1} of {MAX_RESTARTS})"
                )
                self._process = self._start(self._process_config)


@contextmanager
def coordinated(
    replication: Replication, config: RunConfig, run_dir: RunDir, say: Say
) -> Iterator[RunCoordinator]:
    """Where servers have replicas: the coordinator that SHOAL_COORDINATOR names, or a process."""
    if not replication.is_on:
        yield RunCoordinator(config)
        return
    address = config.coordinator
    with (
        own_keys(replace(config, run_dir=run_dir), "the launcher")
        if address and is_etcd(address)
        else nullcontext(),
        closing(RunCoordinator(config, run_dir, say if address is None else None)) as coordinator,
    ):
        yield coordinator
