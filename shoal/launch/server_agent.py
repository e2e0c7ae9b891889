"""The agent of one server, or of the coordinator: `python -m shoal.launch.server_agent`.

    stdin    a ServerTask: role, variables, the secret of the run
    stdout   ServerMessages: where it listens, output, exit; of the coordinator: what it holds
    SIGTERM  the process gets SIGTERM, 2 s, and SIGKILL; the agent exits

A coordinator that dies is started again from its log, at the same address. A server is not: its
state is lost, and the launcher decides where another one starts.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace

from shoal.coordinator.connect import open_coordinator
from shoal.coordinator.interface import Coordinator
from shoal.errors import BadInput, ShoalError
from shoal.launch.agent import MAX_TASK_BYTES, free_port
from shoal.launch.agent_messages import (
    AgentPipe,
    ChainsChanged,
    HostRefused,
    ServerExited,
    ServerListens,
    ServerOutput,
    ServerTask,
)
from shoal.launch.chain_members import follow
from shoal.launch.coordinator import COORDINATOR_COMMAND, MAX_RESTARTS
from shoal.launch.output import LineForwarder, OutputPump
from shoal.launch.process_config import SERVER_COMMAND
from shoal.launch.processes import Processes, ProcessExit
from shoal.launch.supervisor import TERM_S
from shoal.runtime.config import RunConfig
from shoal.runtime.cores import threads_of
from shoal.runtime.decoders import lax_json_decoder
from shoal.runtime.run_dir import RunDir, new_server_dir, signal_name
from shoal.runtime.secret import parse_secret


class ServerAgent:
    """One process, from its start to its exit."""

    def __init__(self, task: ServerTask, run_dir: RunDir, pipe: AgentPipe):
        self.task = task
        self.run_dir = run_dir
        self.pipe = pipe
        self.is_coordinator = task.role == "coordinator"
        self.events: queue.SimpleQueue[ProcessExit | signal.Signals | Exception] = (
            queue.SimpleQueue()
        )
        self._restarts = MAX_RESTARTS if self.is_coordinator else 0

    def run(self) -> int:
        """Returns the exit status of the process."""
        signal.signal(signal.SIGTERM, lambda *_: self.events.put(signal.SIGTERM))
        beyond = f"tcp:{self.task.address}:{free_port()}"
        config = self._config(beyond)
        with (
            Processes(self.events.put, "server") as processes,
            OutputPump(self.events.put) as pump,
        ):
            self._start(config, processes, pump)
            pump.start()
            processes.watch()
            socket = self.run_dir.socket(self.task.index)
            local = self.run_dir.coordinator if self.is_coordinator else socket
            self.pipe.send(ServerListens(processes.pid_of(0), local, beyond))
            over = threading.Event()
            watcher = self._watch_chains(config, over)
            try:
                return self._supervise(config, processes, pump)
            finally:
                over.set()
                if watcher is not None:
                    watcher.close()  # its waits end

    def _config(self, beyond: str) -> RunConfig:
        task = self.task
        own = RunConfig.from_environment().environ
        config = RunConfig.from_environment({**own, **task.variables})
        config = replace(
            config,
            run_dir=self.run_dir,
            hostname=task.address,
            launcher_pid=os.getpid(),
        ).with_environ(PYTHONUNBUFFERED="1", **threads_of(task.servers))
        if self.is_coordinator:
            return replace(config, coordinator_beyond=beyond)
        return replace(config, server=replace(config.server, index=task.index, beyond=beyond))

    def _start(
        self, config: RunConfig, processes: Processes, pump: OutputPump, rank: int | None = None
    ) -> None:
        command = COORDINATOR_COMMAND if self.is_coordinator else SERVER_COMMAND
        out, err = processes.start(command, config.to_environment(), rank=rank)
        pump.add(out, LineForwarder(self._write, "", False))
        pump.add(err, LineForwarder(self._write, "", True))

    def _write(self, text: str, is_stderr: bool) -> None:
        self.pipe.send(ServerOutput(is_stderr, text))

    def _watch_chains(self, config: RunConfig, over: threading.Event) -> Coordinator | None:
        """A thread tells the launcher what the coordinator holds, whenever it changes."""
        if not self.is_coordinator:
            return None
        here = replace(config, coordinator=self.run_dir.coordinator)
        client = open_coordinator(here, "the agent of the coordinator")

        def watch() -> None:
            with suppress(ShoalError, OSError), closing(client):
                follow(client, lambda listing: self.pipe.send(ChainsChanged(listing)), over)

        threading.Thread(target=watch, name="shoal-chains", daemon=True).start()
        return client

    def _supervise(self, config: RunConfig, processes: Processes, pump: OutputPump) -> int:
        """Until it has exited; after SIGTERM for 2 s, and the end of the block kills it."""
        deadline_s: float | None = None
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            try:
                event = self.events.get(timeout=left_s)
            except queue.Empty:
                return -signal.SIGKILL
            if isinstance(event, signal.Signals) and deadline_s is None:
                deadline_s = time.monotonic() + TERM_S
                processes.signal(signal.SIGTERM)
            elif isinstance(event, ProcessExit):
                if deadline_s is not None or event.returncode == 0 or self._restarts == 0:
                    return event.returncode
                self._restarts -= 1
                self._say_again(event.returncode)
                self._start(replace(config, failpoints=()), processes, pump, rank=0)

    def _say_again(self, returncode: int) -> None:
        ended = f"exited with {returncode}"
        if returncode < 0:
            ended = f"was killed ({signal_name(-returncode)})"
        count = f"{MAX_RESTARTS - self._restarts} of {MAX_RESTARTS}"
        self._write(f"the coordinator {ended}: started again ({count})\n", True)


def main() -> None:
    given = sys.stdin.buffer.read(MAX_TASK_BYTES)
    task = lax_json_decoder(ServerTask).decode(given)
    pipe = AgentPipe()
    with suppress(OSError):
        os.chdir(task.folder)
    try:
        run_dir = new_server_dir()
        try:
            run_dir.write_secret(parse_secret(task.secret, "the task of the agent"))
            returncode = ServerAgent(task, run_dir, pipe).run()
            pipe.send(ServerExited(returncode))
        finally:
            run_dir.remove()
    except BadInput as error:
        pipe.send(HostRefused(str(error)))


if __name__ == "__main__":
    main()
