"""The agent of a host: `python -m shoal.launch.hosts.agent` starts processes and reports on them.

    stdin    a HostTask (workers) or a ServerTask (one server, or the coordinator)
    stdout   AgentMessages: output, progress, exits, where a server listens
    SIGUSR1  workers get SIGTERM alone: a preemption, after which they save and exit
    SIGTERM  the processes get SIGTERM, 2 s, and SIGKILL; the agent exits

Workers have the variables of torchrun, so that a script may use them, too. The secret and the
reports of workers are in a directory of this host that only this user can read. If the agent is
killed, the kernel kills its processes. A coordinator that dies is started again from its store, at
the same address. A server is not: its state is lost, and the launcher decides where another one
starts.
"""

from __future__ import annotations

import fcntl
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial

from shoal.comm.members.network_board import board_of
from shoal.comm.store.session import BadFrame, StoreRequest, connect
from shoal.errors import BadInput, ShoalError
from shoal.launch.here.coordinator import RunCoordinator
from shoal.launch.here.local import check_script
from shoal.launch.here.output import LineForwarder, OutputPump, Streams, Write
from shoal.launch.here.process_config import SERVER_COMMAND
from shoal.launch.here.processes import Processes, ProcessExit
from shoal.launch.here.supervisor import TERM_S
from shoal.launch.here.watches import noticing_stopped
from shoal.launch.hosts.agent_messages import (
    AgentTask,
    ChainsChanged,
    FileWritten,
    FoundPort,
    HostRefused,
    HostTask,
    ProcessEnded,
    ProcessOutput,
    ServerListens,
    ServerTask,
    WorkerProgress,
    read_task,
    send,
)
from shoal.runtime.config import RunConfig
from shoal.runtime.memory_limit import cores, threads_of
from shoal.runtime.run_dir import LIVE, RunDir, new_run_dir, written_by
from shoal.runtime.secret import parse_secret

_CONNECT_S = 15.0  # the launcher listens before it starts an agent
_ANSWER_S = 10.0
_NEVER = "the end of the run"  # a key that is not written


@contextmanager
def present(
    address: tuple[str, int], secret: bytes, name: str, on_lost: Callable[[], None]
) -> Iterator[None]:
    """While the block runs the launcher knows this agent; at its end, that it ends by itself.

    `on_lost` is called, from a thread, when the launcher cannot be reached any more.
    """
    is_over = threading.Event()
    with (
        closing(connect(address, secret, _CONNECT_S)) as shown,
        closing(connect(address, secret, _CONNECT_S)) as watched,
    ):

        def wait() -> None:
            with suppress(OSError, BadFrame):
                watched.ask(StoreRequest("wait", [_NEVER]), None)
            if not is_over.is_set():
                on_lost()

        shown.notice_silence()
        watched.notice_silence()
        shown.ask(StoreRequest("present", [name]), _ANSWER_S)
        thread = threading.Thread(target=wait, name="shoal-presence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            with suppress(OSError, BadFrame):
                shown.ask(StoreRequest("present"), _ANSWER_S)
            watched.interrupt()
            thread.join()


MAX_TASK_BYTES = 16 << 20
_SIOCGIFADDR = 0x8915
_STEPS_S = 2.0  # how often the launcher hears how far workers are
_FAULT_STEPS_S = 0.1  # where it kills a server at a step


class Agent:
    """Processes of one role on this host, from their start to the exit of the last one."""

    def __init__(self, task: AgentTask, run_dir: RunDir, first: int):
        """`first`: the rank, or the number of the server, of its first process."""
        self.run_dir = run_dir
        self._first = first
        self._events: queue.SimpleQueue[ProcessExit | signal.Signals | Exception] = (
            queue.SimpleQueue()
        )
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda got, _: self._events.put(signal.Signals(got)))
        own = RunConfig.from_environment().environ
        config = RunConfig.from_environment({**own, **task.variables})
        self.config = replace(config, hostname=task.address).with_environ(PYTHONUNBUFFERED="1")
        kills_server = any(text.startswith("server:") for text in config.kill)
        self._look_s = _FAULT_STEPS_S if kills_server else _STEPS_S

    def _writer(self, rank: int) -> Write:
        return lambda text, is_stderr: send(ProcessOutput(rank, is_stderr, text))

    def _streams(self, rank: int) -> Streams:
        write = self._writer(rank)
        return LineForwarder(write, "", False), LineForwarder(write, "", True)

    def _supervise(self, processes: Processes, left: int) -> None:
        """Until all have exited; after SIGTERM for 2 s, and the end of the block kills the rest."""
        deadline_s: float | None = None
        while left:
            left_s = self._look_s if deadline_s is None else deadline_s - time.monotonic()
            try:
                event = self._events.get(timeout=max(0.0, min(left_s, self._look_s)))
            except queue.Empty:
                if deadline_s is not None and time.monotonic() > deadline_s:
                    return
                self._look()
                continue
            if isinstance(event, ProcessExit):
                left -= 1
                self._report(event)
            elif event == signal.SIGUSR1:
                processes.signal_alone(signal.SIGTERM)
            elif event == signal.SIGTERM and deadline_s is None:
                deadline_s = time.monotonic() + TERM_S
                processes.signal(signal.SIGTERM)

    def _look(self) -> None:
        """Called again and again while processes run."""

    def _report(self, exit: ProcessExit) -> None:
        age_ns = time.monotonic_ns() - exit.noticed_ns
        send(ProcessEnded(self._first + exit.rank, exit.returncode, age_ns))


class WorkerAgent(Agent):
    """The workers of this host."""

    def __init__(self, task: HostTask, run_dir: RunDir):
        super().__init__(task, run_dir, task.first_rank)
        self.task = task
        self._sent: dict[str, str] = {}

    def run(self) -> None:
        check_script(self.task.command)
        port = self.task.master_port
        if port is None:
            port = free_port()
            send(FoundPort(port))
        config = self._config(port)

        def running() -> list[tuple[str, int]]:
            return [(f"worker {self._first + index}", pid) for index, pid in workers.running()]

        def say(sentence: str) -> None:
            self._writer(self._first)(f"shoal: {sentence}\n", True)

        with ExitStack() as stack:
            if config.board is not None:  # elastic: without the launcher they are lost, and end
                lost = partial(self._events.put, signal.SIGTERM)
                stack.enter_context(present(*board_of(config), self.task.name, lost))
            workers = stack.enter_context(Processes(self._events.put))
            pump = stack.enter_context(OutputPump(self._events.put))
            for index in range(self.task.workers):
                self._start(index, config, workers, pump)
            pump.start()
            workers.watch()
            with noticing_stopped(config.wait, running, say):
                self._supervise(workers, self.task.workers)

    # ------------------------------------------------------------------ starting

    def _config(self, port: int) -> RunConfig:
        task = self.task
        config = replace(self.config, host_dir=self.run_dir, secret_file=self.run_dir.secret)
        local_size = task.local_size or task.workers
        threads = task.threads or max(1, (task.cores or cores()) // local_size)
        given = config.environ
        return config.with_environ(
            MASTER_ADDR=task.master,
            MASTER_PORT=str(port),
            WORLD_SIZE=str(task.size),
            LOCAL_WORLD_SIZE=str(local_size),
            OMP_NUM_THREADS=str(threads),
            PYTHONHASHSEED=given.get("PYTHONHASHSEED", "0"),
            **{name: text for name, text in _interfaces(task.address).items() if name not in given},
        )

    def _start(self, index: int, config: RunConfig, workers: Processes, pump: OutputPump) -> None:
        task = self.task
        rank = self._first + index
        config = config.with_environ(RANK=str(rank), LOCAL_RANK=str(task.local_rank + index))
        shows = task.shows_progress
        on_progress = (lambda record: send(WorkerProgress(record))) if shows else None
        pipe = pump.progress_pipe(on_progress)
        inherited = () if pipe is None else (pipe,)
        environ = replace(config, progress_fd=pipe).to_environment()
        program, *words = task.command
        program = sys.executable if program == task.python else program
        pipes = workers.start([program, *words], environ, inherited)
        pump.connect(pipes, self._streams(rank))

    def _look(self) -> None:
        """How far the workers are, and which of them have come back."""
        self._send_files(lambda name: name.startswith(LIVE))

    def _send_files(self, is_sent: Callable[[str], bool]) -> None:
        for file in sorted(self.run_dir.path.iterdir()):  # back-… before steps-…
            if written_by(file.name) is not None and is_sent(file.name):
                text = file.read_text()
                if self._sent.get(file.name) != text:
                    self._sent[file.name] = text
                    send(FileWritten(file.name, text, time.monotonic_ns()))

    def _report(self, exit: ProcessExit) -> None:
        self._send_files(lambda name: written_by(name) == self._first + exit.rank)
        super()._report(exit)


class ServerAgent(Agent):
    """One server, or the coordinator."""

    def __init__(self, task: ServerTask, run_dir: RunDir):
        super().__init__(task, run_dir, task.index)
        self.task = task
        self._remote = f"tcp:{task.address}:{free_port()}"
        config = replace(self.config, run_dir=run_dir, launcher_pid=os.getpid())
        self.config = config.with_environ(**threads_of(task.servers))

    def run(self) -> None:
        if self.task.role == "coordinator":
            self._run_coordinator()
            return
        index = self.task.index
        role = replace(self.config.server, index=index, beyond=self._remote)
        config = replace(self.config, server=role)
        with (
            Processes(self._events.put, "server") as processes,
            OutputPump(self._events.put) as pump,
        ):
            pipes = processes.start(SERVER_COMMAND, config.to_environment())
            pump.connect(pipes, self._streams(index))
            pump.start()
            processes.watch()
            send(ServerListens(processes.pid_of(0), self.run_dir.socket(index), self._remote))
            self._supervise(processes, 1)

    def _run_coordinator(self) -> None:
        """Until SIGTERM; it reports to the launcher what it holds, whenever that changes."""
        config = replace(self.config, coordinator_beyond=self._remote)

        def say(line: str) -> None:
            self._writer(0)(f"{line}\n", True)

        with closing(RunCoordinator(config, self.run_dir, say)) as coordinator:
            send(ServerListens(coordinator.pid, self.run_dir.coordinator, self._remote))
            coordinator.watch(lambda listing: send(ChainsChanged(listing)))
            while self._events.get() != signal.SIGTERM:
                pass


def free_port() -> int:
    """Of this host."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def _interfaces(address: str) -> dict[str, str]:
    """Variables that let Gloo and NCCL use the interface which has this address.

    By themselves they take the one to which the name of the host leads, which others may not reach.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        wanted = socket.gethostbyname(address)
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                asked = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, asked)[20:24]
                if socket.inet_ntoa(found) == wanted:
                    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}


def main() -> None:
    try:
        task = read_task(sys.stdin.buffer.read(MAX_TASK_BYTES))
        with suppress(OSError):
            os.chdir(task.folder)
        secret = parse_secret(task.secret, "the task of the agent")
        with new_run_dir("host" if isinstance(task, HostTask) else "ps", secret) as run_dir:
            if isinstance(task, HostTask):
                WorkerAgent(task, run_dir).run()
            else:
                ServerAgent(task, run_dir).run()
    except BadInput as error:
        send(HostRefused(str(error)))
    except ShoalError as error:  # this host is cut off from that of the launcher: it is lost
        print(f"shoal: {error}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
