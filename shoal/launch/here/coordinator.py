"""The coordinator of a run with replicated servers: a process beside them, or an etcd cluster.

    with coordinator_of(config, run_dir, say) as coordinator:
        … start servers and workers with coordinator.config …
        coordinator.watch()            # after the last fork: it starts a thread

The process is started again when it dies, from its log; servers go on meanwhile.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

from shoal.coordinator.connect import open_coordinator
from shoal.coordinator.etcd.coordinator import EtcdCoordinator
from shoal.coordinator.etcd.gateway import is_etcd
from shoal.coordinator.interface import Coordinator, CoordinatorError, Listing, forget
from shoal.errors import BadInput, ShoalError
from shoal.launch.here.process_config import Replication
from shoal.launch.losses.lost_servers import ChainMembers, follow
from shoal.runtime.config import RunConfig
from shoal.runtime.parent_death import in_child
from shoal.runtime.run_dir import RunDir, signal_name

COORDINATOR_COMMAND = (sys.executable, "-m", "shoal.coordinator.main")
MAX_RESTARTS = 5
_TERM_S = 5.0
Say = Callable[[str], None]


class RunCoordinator:
    """`config` names the coordinator, for servers and workers."""

    def __init__(self, config: RunConfig, run_dir: RunDir | None = None):
        self.config = config
        self.members: ChainMembers | None = None
        self._run_dir = run_dir
        self._over = threading.Event()
        self._asking: list[tuple[threading.Thread, Coordinator]] = []

    def watch(self, see: Callable[[Listing], None] | None = None) -> None:
        """From now on it is followed who is in the chains; `see` is called with every change."""
        client = self._client()
        members = self.members
        if members is not None:
            see = members.see
        if client is None or see is None:
            return
        told = see

        def run() -> None:
            with suppress(ShoalError, OSError), closing(client):
                follow(client, told, self._over)

        def look() -> None:
            with suppress(ShoalError, OSError):
                if members is not None and members.is_known and not self._over.is_set():
                    members.see(client.list(""))

        if members is not None:
            members.look = look
        self._ask("shoal-chains", run, client)

    def _client(self) -> Coordinator | None:
        if self.config.coordinator is None or self._run_dir is None:
            return None
        return open_coordinator(replace(self.config, run_dir=self._run_dir), "the launcher")

    def _ask(self, name: str, target: Callable[[], None], client: Coordinator) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._asking.append((thread, client))
        thread.start()

    def server_exited(self, index: int, pid: int) -> None:
        """Say so, in the background: the other replicas need not wait for the end of its lease."""
        client = self._client()
        if client is None:
            return

        def say() -> None:
            with suppress(ShoalError, OSError), closing(client):
                forget(client, index, pid)

        self._ask("shoal-lost-server", say, client)

    def close(self) -> None:
        """No process, thread or key is left."""
        self._over.set()
        for thread, client in self._asking:
            client.close()  # its waits end
            thread.join()


class EmbeddedCoordinator(RunCoordinator):
    """A process of the launcher. `say` prints a line of the launcher."""

    def __init__(self, config: RunConfig, run_dir: RunDir, say: Say):
        super().__init__(replace(config, coordinator=run_dir.coordinator), run_dir)
        self._say = say
        self._process_config = _process_config(config, run_dir)
        self._restarts = 0
        self._changing = threading.Lock()
        self._is_closed = False
        self._watcher: threading.Thread | None = None
        try:
            self._process = self._start(self._process_config)
        except OSError as error:
            raise BadInput(f"cannot start the coordinator: {error.strerror}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, see: Callable[[Listing], None] | None = None) -> None:
        """Also, a coordinator that dies is started again."""
        super().watch(see)
        self._watcher = threading.Thread(target=self._watch, name="shoal-coordinator", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        with self._changing:
            self._is_closed = True
        super().close()
        _end(self._process)
        if self._watcher is not None:
            self._watcher.join()
        else:
            _close_output(self._process)

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
        """Until it ends for good: print what it writes, start it again."""
        while True:
            returncode = self._forward()
            with self._changing:
                if self._is_closed or not self._restarted(returncode):
                    return

    def _forward(self) -> int:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._say(f"coordinator: {line.decode(errors='replace').rstrip()}")
        _close_output(self._process)
        return self._process.wait()

    def _restarted(self, returncode: int) -> bool:
        ended = f"exited with {returncode}"
        if returncode < 0:
            ended = f"was killed ({signal_name(-returncode)})"
        if self._restarts >= MAX_RESTARTS:
            self._say(f"the coordinator {ended} again: no server that is lost can be replaced now")
            return False
        self._restarts += 1
        self._say(f"the coordinator {ended}: started again ({self._restarts} of {MAX_RESTARTS})")
        try:
            self._process = self._start(replace(self._process_config, failpoints=()))
        except OSError as error:
            self._say(f"the coordinator cannot be started again: {error.strerror}")
            return False
        return True


class EtcdKeys(RunCoordinator):
    """The keys of this run in an etcd cluster of the user; they are removed at its end."""

    def __init__(self, config: RunConfig, run_dir: RunDir):
        """BadInput where the cluster does not answer."""
        super().__init__(config, run_dir)
        self._etcd = open_coordinator(replace(config, run_dir=run_dir), "the launcher")
        assert isinstance(self._etcd, EtcdCoordinator)
        try:
            self._etcd.remove_all()
        except CoordinatorError as error:
            self._etcd.close()
            raise BadInput(f"SHOAL_COORDINATOR is {config.coordinator}: {error}") from error

    def close(self) -> None:
        super().close()
        assert isinstance(self._etcd, EtcdCoordinator)
        with suppress(CoordinatorError):
            self._etcd.remove_all()
        self._etcd.close()


@contextmanager
def coordinator_of(config: RunConfig, run_dir: RunDir, say: Say) -> Iterator[RunCoordinator]:
    """The one that SHOAL_COORDINATOR names, or else a process of this launcher."""
    if config.coordinator is None:
        coordinator: RunCoordinator = EmbeddedCoordinator(config, run_dir, say)
    elif is_etcd(config.coordinator):
        coordinator = EtcdKeys(config, run_dir)
    else:
        coordinator = RunCoordinator(config, run_dir)
    try:
        yield coordinator
    finally:
        coordinator.close()


@contextmanager
def coordinated(
    replication: Replication, servers: int, config: RunConfig, run_dir: RunDir, say: Say
) -> Iterator[RunCoordinator]:
    """A coordinator where servers have replicas; else there is nothing to coordinate."""

    def say_before_end(line: str) -> None:
        if not run_dir.ending.exists():  # then servers leave because they are ended
            say(line)

    if not replication.is_on:
        yield RunCoordinator(config)
        return
    with coordinator_of(config, run_dir, say) as coordinator:
        coordinator.members = ChainMembers(replication, servers, say_before_end)
        yield coordinator


def _process_config(config: RunConfig, run_dir: RunDir) -> RunConfig:
    process = replace(
        config,
        rank=None,
        local_rank=None,
        rendezvous=None,
        run_dir=run_dir,
        launcher_pid=os.getpid(),
        progress_fd=None,
    )
    return process.with_environ(PYTHONUNBUFFERED="1")


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
        process.terminate()
    try:
        process.wait(_TERM_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _close_output(process: subprocess.Popen[bytes]) -> None:
    if process.stderr is not None:
        process.stderr.close()
